#pragma once

#include <limits>

#include "cli/commands.h"

namespace CLI {
class App;
}  // namespace CLI

namespace tessera {

/// Counts of what stands in memory or in a command line; far beyond what is of use.
inline constexpr double kManyThings = 1 << 20;
inline constexpr double kManyThreads = 4096;
/// Positions and ids of tokens are I32.
inline constexpr double kManyTokens = std::numeric_limits<int32_t>::max();

/// Each adds a subcommand to the program whose options are read into the arguments, which must
/// outlive it. These take a configuration, "[CONFIG] [--section.key=value ...]", too:
CLI::App* add_train(CLI::App& app, TrainArguments& train);
CLI::App* add_dpo(CLI::App& app, TrainArguments& dpo);
CLI::App* add_rl(CLI::App& app, TrainArguments& rl);
CLI::App* add_verify(CLI::App& app, VerifyArguments& verify);
CLI::App* add_bench(CLI::App& app, BenchArguments& bench);
CLI::App* add_plan(CLI::App& app, PlanArguments& plan);
CLI::App* add_inspect(CLI::App& app, InspectArguments& inspect);

/// These take checkpoints, text or nothing:
CLI::App* add_eval(CLI::App& app, EvalArguments& eval);
CLI::App* add_generate(CLI::App& app, GenerateArguments& generate);
CLI::App* add_serve(CLI::App& app, ServeArguments& serve);
CLI::App* add_tokenize(CLI::App& app, TokenizeArguments& tokenize);
CLI::App* add_convert(CLI::App& app, ConvertArguments& convert);
CLI::App* add_upcycle(CLI::App& app, UpcycleArguments& upcycle);
CLI::App* add_doctor(CLI::App& app, DoctorArguments& doctor);

}  // namespace tessera
