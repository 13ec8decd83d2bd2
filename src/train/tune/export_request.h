#pragma once

#include <string>
#include <vector>

#include "hf/convert.h"
#include "train/setup/settings.h"

namespace tessera {

/// Has the file of a run's tokenizer go along with an export; returns what the user should know.
std::vector<std::string> add_tokenizer(const DataSettings& data, ExportRequest& request);

/// What the weights of a run are handed over as. Throws UserError where the model's origin, by
/// whose config.json they would be laid out, is not there.
ExportRequest request_export(const Settings& settings);

}  // namespace tessera
