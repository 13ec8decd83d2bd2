#include <unistd.h>

#include <iostream>

#include "cli/commands.h"
#include "comm/launch.h"
#include "core/progress.h"
#include "core/saturating.h"
#include "train/machine.h"
#include "train/size_check.h"
#include "train/trainer.h"

namespace tessera {
namespace {

/// Of a process that trains next to nothing.
constexpr int64_t kLeastRankBytes = int64_t{32} << 20;

/// Starts local ranks; mistakes in the settings are found before.
int start_ranks(const Settings& settings, const TrainArguments& arguments) {
  validate(settings);
  check_model(settings, arguments.ranks);
  require_host_memory((Saturating(arguments.ranks) * kLeastRankBytes).value(), machine_memory(),
                      fmt::format("{} ranks on this machine", arguments.ranks));
  return launch_local_ranks(arguments.ranks, arguments.command);
}

/// mpirun gives each rank a terminal of its own, wherever the output goes. Under a launcher only
/// one that this process is under the control of is the user's.
Terminal find_terminal() {
  const bool launched = detect_launch(process_environment()).launcher != Launcher::kNone;
  const bool users = !launched || tcgetpgrp(STDOUT_FILENO) != -1;
  return users ? detect_terminal(STDOUT_FILENO) : Terminal{};
}

}  // namespace

int run_train(const TrainArguments& arguments) {
  Settings settings;
  ConfigSchema schema = make_schema(settings);
  load_settings(schema, settings, arguments.config.file, arguments.config.overrides);
  if (arguments.print_config) {
    std::cout << (arguments.json ? schema.to_json() + "\n" : schema.to_toml());
    return 0;
  }
  if (arguments.ranks > 0) return start_ranks(settings, arguments);
  const auto world = connect_world({.timeout_seconds = settings.run.comm_timeout});
  return run_rank(*world, [&] {
    return train({.settings = settings,
                  .config_toml = schema.to_toml(),
                  .terminal = find_terminal(),
                  .trace = arguments.trace},
                 *world, std::cout);
  });
}

std::string config_help() {
  Settings settings;
  return make_schema(settings).help_text();
}

}  // namespace tessera
