#pragma once

#include <string>
#include <vector>

#include "hf/config/config_json.h"
#include "model/config/config.h"

namespace tessera {

/// Reads what a configuration says of experts, routers and which layers have them, where the family
/// has any. Adds to `notes` what transformers does otherwise than the file says. Throws UserError
/// for what is not supported.
void read_moe(const ConfigJson& config, ModelConfig& model, std::vector<std::string>& notes);

}  // namespace tessera
