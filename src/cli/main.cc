#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>

#include "cli/commands.h"
#include "core/error.h"
#include "core/names.h"

namespace tessera {
namespace {

constexpr int kUserErrorCode = 2;
constexpr int kInternalErrorCode = 1;

/// Takes "[CONFIG] [--section.key=value ...]".
void add_config(CLI::App& command, ConfigArguments& config) {
  command.add_option("config", config.file, "Configuration file (TOML)");
  command.allow_extras();
  command.footer([] {
    return "Any key of the configuration can be given as --section.key=value:\n\n" + config_help();
  });
}

/// What CLI11 did not know must be overrides of the configuration.
void take_overrides(const CLI::App& command, ConfigArguments& config) {
  for (const std::string& argument : command.remaining()) {
    require(argument.starts_with("--"), "unexpected argument '{}'; see tessera {} --help", argument,
            command.get_name());
    config.overrides.push_back(argument);
  }
}

CLI::App* add_train(CLI::App& app, TrainArguments& train) {
  CLI::App* command =
      app.add_subcommand("train", "Train a model; the same command continues a stopped run");
  add_config(*command, train.config);
  command->add_flag("--print-config", train.print_config,
                    "Print each resolved value and its origin, then stop");
  command->add_flag("--json", train.json, "With --print-config: as JSON");
  return command;
}

CLI::App* add_eval(CLI::App& app, EvalArguments& eval) {
  CLI::App* command =
      app.add_subcommand("eval", "Loss, perplexity and bits per byte of text under a model");
  EvaluationRequest& request = eval.request;
  command->add_option("checkpoint", eval.checkpoint, "Run folder or checkpoint")->required();
  command->add_option("--text", request.text,
                      "Text file or folder; default: the run's held-out data");
  command->add_option("--tokens", request.tokens, "Prefix of a token file instead");
  command
      ->add_option("--sequence-length", request.sequence_length,
                   "Tokens of a window; 0: as trained")
      ->capture_default_str();
  command->add_option("--batch-size", request.batch_size, "Windows evaluated together")
      ->capture_default_str();
  command->add_option("--max-batches", request.max_batches, "Stop after so many batches; 0: all")
      ->capture_default_str();
  command->add_flag("--json", eval.json, "Print JSON");
  return command;
}

/// CLI11 would turn -1 into the largest unsigned number.
std::string refuse_negative(const std::string& text) {
  return text.starts_with('-') ? "must not be negative" : "";
}

CLI::App* add_generate(CLI::App& app, GenerateArguments& generate) {
  CLI::App* command = app.add_subcommand("generate", "Continue a text with a trained model");
  GenerateOptions& options = generate.options;
  command->add_option("checkpoint", generate.checkpoint, "Run folder or checkpoint")->required();
  command->add_option("--prompt", generate.prompt, "Text to continue; empty: a new document");
  command->add_option("--max-tokens", options.max_tokens, "Most tokens to generate")
      ->capture_default_str();
  command->add_option("--temperature", options.temperature, "0: always the most likely token")
      ->capture_default_str();
  command->add_option("--top-k", options.top_k, "Only the k most likely tokens; 0: all")
      ->capture_default_str();
  command
      ->add_option("--top-p", options.top_p,
                   "Only the most likely tokens of this total probability")
      ->capture_default_str();
  command->add_option("--seed", options.seed, "Seed of the choice")
      ->check(refuse_negative)
      ->capture_default_str();
  command->add_flag("--logprobs", generate.log_probabilities, "Print each token's log-probability");
  command->add_flag("--json", generate.json, "Print JSON");
  return command;
}

CLI::App* add_inspect(CLI::App& app, InspectArguments& inspect) {
  CLI::App* command =
      app.add_subcommand("inspect", "Show programs, memory, presets, checkpoints, reports");
  add_config(*command, inspect.config);
  command->add_flag("--program", inspect.program, "The layers' forward and backward programs");
  command->add_flag("--memory", inspect.memory, "Predicted memory of a training run");
  command->add_flag("--presets", inspect.presets, "The model presets");
  command->add_option("--checkpoint", inspect.checkpoint, "Tensors and state of a checkpoint");
  command->add_option("--report", inspect.report, "Rebuild report.html of a run folder");
  command->add_flag("--json", inspect.json, "Print JSON");
  return command;
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

int parse_and_run(int argc, char** argv) {
  CLI::App app{"Tessera trains Mixture-of-Experts language models."};
  app.name("tessera");
  app.require_subcommand(1);
  app.set_version_flag("--version", TESSERA_VERSION);
  TrainArguments train;
  EvalArguments eval;
  GenerateArguments generate;
  InspectArguments inspect;
  DoctorArguments doctor;
  const CLI::App* train_command = add_train(app, train);
  const CLI::App* eval_command = add_eval(app, eval);
  const CLI::App* generate_command = add_generate(app, generate);
  const CLI::App* inspect_command = add_inspect(app, inspect);
  app.add_subcommand("doctor", "What this machine has and how fast it is")
      ->add_flag("--json", doctor.json, "Print JSON");
  check_subcommand(app, argc, argv);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    user_error("{}; see tessera --help", error.what());
  }
  take_overrides(*train_command, train.config);
  take_overrides(*inspect_command, inspect.config);
  if (*train_command) return run_train(train);
  if (*eval_command) return run_eval(eval);
  if (*generate_command) return run_generate(generate);
  if (*inspect_command) return run_inspect(inspect);
  return run_doctor(doctor);
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  try {
    return tessera::parse_and_run(argc, argv);
  } catch (const tessera::UserError& error) {
    std::cerr << "tessera: " << error.what() << "\n";
    return tessera::kUserErrorCode;
  } catch (const std::exception& error) {
    std::cerr << "tessera: internal error: " << error.what() << "\n";
    return tessera::kInternalErrorCode;
  }
}
