#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <iostream>

#include "cli/commands.h"
#include "cli/options.h"
#include "core/config/config.h"
#include "core/error.h"
#include "core/limits.h"
#include "core/process/cpu_level.h"
#include "core/text/names.h"

namespace tessera {
namespace {

/// What CLI11 did not know must be overrides of the configuration.
void take_overrides(const CLI::App& command, ConfigArguments& config) {
  for (const std::string& argument : command.remaining()) {
    require(argument.starts_with("--"), "unexpected argument '{}'; see tessera {} --help", argument,
            command.get_name());
    // Before what follows it, which is then taken for the configuration file.
    require(argument.find('=') != std::string::npos,
            "'{}' is no option of tessera {}; keys are given as --section.key=value, and tessera "
            "{} --help lists the options",
            argument, command.get_name(), command.get_name());
    config.overrides.push_back(argument);
  }
}

/// An unknown subcommand is named with the nearest one, which CLI11 would not do.
void check_subcommand(const CLI::App& app, int argc, char** argv) {
  if (argc < 2 || argv[1][0] == '-') return;
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(command->get_name());
  }
  require(std::ranges::find(names, argv[1]) != names.end(),
          "unknown subcommand '{}'{}; see tessera --help", argv[1], did_you_mean(argv[1], names));
}

/// This command line for the ranks that it starts, which must not start others.
std::vector<std::string> without_ranks(int argc, char** argv) {
  std::vector<std::string> command = {std::filesystem::read_symlink("/proc/self/exe").string()};
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--ranks") ++i;
    if (argument != "--ranks" && !argument.starts_with("--ranks=")) command.emplace_back(argument);
  }
  return command;
}

struct AllArguments {
  TrainArguments train;
  TrainArguments dpo;
  TrainArguments rl;
  VerifyArguments verify;
  EvalArguments eval;
  GenerateArguments generate;
  ServeArguments serve;
  TokenizeArguments tokenize;
  InspectArguments inspect;
  ConvertArguments convert;
  UpcycleArguments upcycle;
  BenchArguments bench;
  PlanArguments plan;
  DoctorArguments doctor;
};

struct Command {
  const CLI::App* app;
  ConfigArguments* config;  ///< where it takes a configuration
  bool computes;            ///< with all threads that OpenMP gives
  std::function<int()> run;
};

std::vector<Command> add_commands(CLI::App& app, AllArguments& all, StandardOutput& output) {
  return {
      {add_train(app, all.train), &all.train.config, true,
       [&] { return run_train(all.train, output); }},
      {add_dpo(app, all.dpo), &all.dpo.config, true,
       [&] { return run_tune(all.dpo, Objective::kDpo, output); }},
      {add_rl(app, all.rl), &all.rl.config, true,
       [&] { return run_tune(all.rl, Objective::kGrpo, output); }},
      {add_verify(app, all.verify), &all.verify.config, true,
       [&] { return run_verify(all.verify, std::cout); }},
      {add_eval(app, all.eval), nullptr, true, [&] { return run_eval(all.eval); }},
      {add_generate(app, all.generate), nullptr, true, [&] { return run_generate(all.generate); }},
      {add_serve(app, all.serve), nullptr, true, [&] { return run_serve(all.serve); }},
      {add_tokenize(app, all.tokenize), nullptr, false, [&] { return run_tokenize(all.tokenize); }},
      {add_inspect(app, all.inspect), &all.inspect.config, false,
       [&] { return run_inspect(all.inspect); }},
      {add_convert(app, all.convert), nullptr, true, [&] { return run_convert(all.convert); }},
      {add_upcycle(app, all.upcycle), nullptr, true, [&] { return run_upcycle(all.upcycle); }},
      {add_bench(app, all.bench), &all.bench.config, true, [&] { return run_bench(all.bench); }},
      {add_plan(app, all.plan), &all.plan.config, false,
       [&] { return run_plan(all.plan, std::cout); }},
      {add_doctor(app, all.doctor), nullptr, true, [&] { return run_doctor(all.doctor); }}};
}

const Command& find_chosen(const std::vector<Command>& commands) {
  const auto chosen =
      std::ranges::find_if(commands, [](const Command& c) { return c.app->parsed(); });
  ensure(chosen != commands.end(), "no subcommand was parsed");
  return *chosen;
}

/// A rank that cannot run says so to the others.
int refuse(const CLI::App& app, const std::string& why) {
  if (app.got_subcommand("train")) return refuse_rank(why);
  throw UserError(why);
}

}  // namespace

int run_command_line(int argc, char** argv, StandardOutput& output) {
  check_stack_limit();
  CLI::App app{"Tessera trains Mixture-of-Experts language models."};
  app.name("tessera");
  app.require_subcommand(1);
  app.set_version_flag("--version", TESSERA_VERSION);
  AllArguments all;
  const std::vector<Command> commands = add_commands(app, all, output);
  check_subcommand(app, argc, argv);
  const Command* chosen = nullptr;
  try {
    app.parse(argc, argv);
    chosen = &find_chosen(commands);
    if (chosen->config != nullptr) take_overrides(*chosen->app, *chosen->config);
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    return refuse(app, fmt::format("{}; see tessera --help", error.what()));
  } catch (const UserError& error) {
    return refuse(app, error.what());
  }
  all.train.command = without_ranks(argc, argv);
  cpu_levels();  // a wrong TESSERA_CPU is refused before anything begins
  if (chosen->computes) check_compute_limits();
  return chosen->run();
}

}  // namespace tessera
