#include <unistd.h>

#include <iostream>

#include "cli/commands.h"
#include "core/progress.h"
#include "train/trainer.h"

namespace tessera {

int run_train(const TrainArguments& arguments) {
  Settings settings;
  ConfigSchema schema = make_schema(settings);
  load_settings(schema, settings, arguments.config.file, arguments.config.overrides);
  if (arguments.print_config) {
    std::cout << (arguments.json ? schema.to_json() + "\n" : schema.to_toml());
    return 0;
  }
  return train({.settings = settings,
                .config_toml = schema.to_toml(),
                .terminal = detect_terminal(STDOUT_FILENO)},
               std::cout);
}

std::string config_help() {
  Settings settings;
  return make_schema(settings).help_text();
}

}  // namespace tessera
