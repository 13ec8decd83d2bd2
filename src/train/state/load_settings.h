#pragma once

#include <string>
#include <vector>

#include "train/setup/settings.h"

namespace tessera {

/// Fills a schema from an optional TOML file, overrides ("--section.key=value") and the preset that
/// they name.
void load_settings(ConfigSchema& schema, Settings& settings, const std::string& file,
                   const std::vector<std::string>& overrides);

}  // namespace tessera
