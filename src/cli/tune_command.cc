#include <unistd.h>

#include <iostream>

#include "cli/commands.h"
#include "comm/launch/launch.h"
#include "core/process/progress.h"
#include "core/process/signal_thread.h"
#include "train/state/load_settings.h"
#include "train/tune/tune_run.h"

namespace tessera {

int run_tune(const TrainArguments& arguments, Objective objective, StandardOutput& output) {
  const bool is_dpo = objective == Objective::kDpo;
  Settings settings;
  ConfigSchema schema = make_schema(settings);
  load_settings(schema, settings, arguments.config.file, arguments.config.overrides);
  const Objective given = settings.train.objective;
  require(given == Objective::kNextToken || given == objective,
          "train.objective is \"{}\", but `tessera {}` trains for \"{}\"; leave it out, or use "
          "`tessera {}`",
          given == Objective::kDpo ? "dpo" : "grpo", is_dpo ? "dpo" : "rl", is_dpo ? "dpo" : "grpo",
          is_dpo ? "rl" : "dpo");
  schema.override_argument(fmt::format("--train.objective={}", is_dpo ? "dpo" : "grpo"));
  if (arguments.print_config) {
    std::cout << (arguments.json ? schema.to_json() + "\n" : schema.to_toml());
    return 0;
  }
  output.keep_going("; training goes on, and metrics.jsonl in the run's folder has each step");
  const SignalThread signals;
  const auto world = connect_world({.timeout_seconds = settings.run.comm_timeout});
  const TrainRequest request{.settings = settings,
                             .config_toml = schema.to_toml(),
                             .terminal = detect_terminal(STDOUT_FILENO),
                             .given_batches = true};
  (is_dpo ? train_on_preferences : train_on_rewards)(request, *world, std::cout);
  return 0;
}

}  // namespace tessera
