#include <unistd.h>

#include <iostream>

#include "cli/commands.h"
#include "comm/agreement/agreement.h"
#include "comm/error.h"
#include "comm/launch/launch.h"
#include "core/exit_code.h"
#include "core/process/progress.h"
#include "core/process/signal_thread.h"
#include "core/saturating.h"
#include "train/run/run_statement.h"
#include "train/run/train_loop.h"
#include "train/setup/machine.h"
#include "train/setup/size_check.h"
#include "train/state/load_settings.h"
#include "train/trainer/trainer.h"

namespace tessera {
namespace {

constexpr const char* kTrain = "train";
// A rank that cannot run waits so long for others whom it can tell.
constexpr double kRefusalSeconds = 60;
/// Of a process that trains next to nothing.
constexpr int64_t kLeastRankBytes = int64_t{32} << 20;

/// Starts local ranks; mistakes in the settings are found before.
int start_ranks(const Settings& settings, const TrainArguments& arguments) {
  const LaunchSignals signals;  // the driver of GPUs starts threads
  validate(settings);
  check_model(settings, arguments.ranks);
  require_host_memory((Saturating(arguments.ranks) * kLeastRankBytes).value(), machine_memory(),
                      fmt::format("{} ranks on this machine", arguments.ranks));
  return launch_local_ranks(arguments.ranks, arguments.command, signals, std::cout);
}

/// mpirun gives each rank a terminal of its own, wherever the output goes. Under a launcher only
/// one that this process is under the control of is the user's.
Terminal find_terminal() {
  const bool launched = detect_launch(process_environment()).launcher != Launcher::kNone;
  const bool users = !launched || tcgetpgrp(STDOUT_FILENO) != -1;
  return users ? detect_terminal(STDOUT_FILENO) : Terminal{};
}

bool is_one_of_several() {
  try {
    return detect_launch(process_environment()).num_ranks > 1;
  } catch (const UserError&) {
    return false;  // then it cannot find the others
  }
}

/// What this rank says to the others; a failure is part of it.
RankStatement make_statement(const ConfigSchema& schema, const Settings& settings,
                             const std::string& trace) {
  RankStatement statement = state_program(kTrain, TESSERA_VERSION);
  try {
    state_run(statement, schema, settings, trace);
  } catch (const UserError& error) {
    statement.failure = error.what();
  }
  return statement;
}

void require_next_token(const Settings& settings) {
  const Objective objective = settings.train.objective;
  if (objective == Objective::kNextToken) return;
  user_error("train.objective is \"{}\"; `tessera {}` trains for it",
             objective == Objective::kDpo ? "dpo" : "grpo",
             objective == Objective::kDpo ? "dpo" : "rl");
}

/// Trains alone, or as one of the ranks that are there.
int start_training(const ConfigSchema& schema, const Settings& settings,
                   const TrainArguments& arguments) {
  const SignalThread signals;
  const auto world = connect_world(
      {.timeout_seconds = settings.run.comm_timeout, .shared_memory = settings.run.shared_memory});
  return run_rank(*world, [&] {
    if (world->size() > 1 &&
        !ranks_agree(*world, make_statement(schema, settings, arguments.trace)))
      return kUserErrorCode;
    return train({.settings = settings,
                  .config_toml = schema.to_toml(),
                  .terminal = find_terminal(),
                  .trace = arguments.trace},
                 *world, std::cout);
  });
}

}  // namespace

int refuse_rank(const std::string& why) {
  if (!is_one_of_several()) throw UserError(why);
  RankStatement statement = state_program(kTrain, TESSERA_VERSION);
  statement.failure = why;
  try {
    const auto world = connect_world({.timeout_seconds = kRefusalSeconds});
    return run_rank(*world, [&] {
      try {
        ranks_agree(*world, statement);
      } catch (const CommError&) {
        throw UserError(why);  // what the others do matters less
      }
      return kUserErrorCode;
    });
  } catch (const UserError&) {
    user_error("rank {}: {}", detect_launch(process_environment()).rank, why);
  }
}

int run_train(const TrainArguments& arguments, StandardOutput& output) {
  Settings settings;
  ConfigSchema schema = make_schema(settings);
  try {
    load_settings(schema, settings, arguments.config.file, arguments.config.overrides);
    if (arguments.print_config) {
      std::cout << (arguments.json ? schema.to_json() + "\n" : schema.to_toml());
      return 0;
    }
    require_next_token(settings);
    // What is printed is worth less than the run.
    output.keep_going("; training goes on, and metrics.jsonl in the run's folder has each step");
    if (arguments.ranks > 0) return start_ranks(settings, arguments);
  } catch (const UserError& error) {
    return refuse_rank(error.what());
  }
  return start_training(schema, settings, arguments);
}

std::string config_help() {
  Settings settings;
  return make_schema(settings).help_text();
}

}  // namespace tessera
