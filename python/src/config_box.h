#pragma once

#include <string>
#include <utility>
#include <vector>

#include "train/setup/settings.h"

namespace tessera::python {

/// Where settings come from; later ones win.
struct ConfigSources {
  std::string file;  ///< TOML, of which `text` is what it held; empty: none
  std::string text;  ///< TOML; empty: none, or yet to be read from the file
  /// Keys with values as on the command line.
  std::vector<std::pair<std::string, std::string>> overrides;
};

/// Settings and the description of them, as they were resolved. Never changed after it was made.
class ConfigBox {
 public:
  explicit ConfigBox(const ConfigSources& sources);
  ConfigBox(const ConfigBox&) = delete;
  ConfigBox& operator=(const ConfigBox&) = delete;

  const Settings& settings() const { return settings_; }
  const ConfigSchema& schema() const { return schema_; }
  const ConfigSources& sources() const { return sources_; }

 private:
  ConfigSources sources_;
  Settings settings_;
  ConfigSchema schema_;
};

}  // namespace tessera::python
