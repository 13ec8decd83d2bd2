#include "train/state/load_settings.h"

#include "train/state/initial_weights.h"

namespace tessera {

void load_settings(ConfigSchema& schema, Settings& settings, const std::string& file,
                   const std::vector<std::string>& overrides) {
  if (!file.empty()) schema.load_toml(file);
  for (const std::string& argument : overrides) schema.override_argument(argument);
  if (!settings.preset.empty())
    schema.load_preset(settings.preset, find_preset(settings.preset).toml);
  if (!settings.run.init_from.empty()) load_initial_model(schema, settings);
  settings.schedule.num_steps = settings.train.steps;
}

}  // namespace tessera
