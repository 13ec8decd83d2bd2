#include <CLI/CLI.hpp>
#include <iostream>

#include "cli/commands.h"
#include "core/error.h"

namespace tessera {
namespace {

constexpr int kUserErrorCode = 2;
constexpr int kInternalErrorCode = 1;

/// Takes "[CONFIG] [--section.key=value ...]".
void add_config(CLI::App& command, ConfigArguments& config) {
  command.add_option("config", config.file, "Configuration file (TOML)");
  command.allow_extras();
  command.footer([] { return "Any key of the configuration can be given as --section.key=value:\n\n" + config_help(); });
}

/// What CLI11 did not know must be overrides of the configuration.
void take_overrides(const CLI::App& command, ConfigArguments& config) {
  for (const std::string& argument : command.remaining()) {
    require(argument.starts_with("--"), "unexpected argument '{}'; see tessera {} --help", argument,
            command.get_name());
    config.overrides.push_back(argument);
  }
}

int add_and_run(int argc, char** argv) {
  CLI::App app{"Tessera trains Mixture-of-Experts language models."};
  app.name("tessera");
  app.require_subcommand(1);
  app.set_version_flag("--version", TESSERA_VERSION);

  TrainArguments train;
  CLI::App* train_command = app.add_subcommand("train", "Train a model; the same command continues a stopped run");
  add_config(*train_command, train.config);
  train_command->add_flag("--print-config", train.print_config, "Print each resolved value and its origin, then stop");
  train_command->add_flag("--json", train.json, "With --print-config: as JSON");

  EvalArguments eval;
  CLI::App* eval_command = app.add_subcommand("eval", "Loss, perplexity and bits per byte of text under a model");
  eval_command->add_option("checkpoint", eval.checkpoint, "Run folder or checkpoint")->required();
  eval_command->add_option("--text", eval.request.text, "Text file or folder; default: the run's held-out data");
  eval_command->add_option("--tokens", eval.request.tokens, "Prefix of a token file instead");
  eval_command->add_option("--sequence-length", eval.request.sequence_length, "Tokens of a window; 0: as trained")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  eval_command->add_option("--batch-size", eval.request.batch_size, "Windows evaluated together")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  eval_command->add_option("--max-batches", eval.request.max_batches, "Stop after so many batches; 0: all")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  eval_command->add_flag("--json", eval.json, "Print JSON");

  GenerateArguments generate;
  CLI::App* generate_command = app.add_subcommand("generate", "Continue a text with a trained model");
  generate_command->add_option("checkpoint", generate.checkpoint, "Run folder or checkpoint")->required();
  generate_command->add_option("--prompt", generate.prompt, "Text to continue; empty: a new document");
  generate_command->add_option("--max-tokens", generate.options.max_tokens, "Most tokens to generate")
      ->capture_default_str();
  generate_command->add_option("--temperature", generate.options.temperature, "0: always the most likely token")
      ->capture_default_str();
  generate_command->add_option("--top-k", generate.options.top_k, "Only the k most likely tokens; 0: all")
      ->capture_default_str();
  generate_command->add_option("--top-p", generate.options.top_p, "Only the most likely tokens of this total probability")
      ->capture_default_str();
  generate_command->add_option("--seed", generate.options.seed, "Seed of the choice")->capture_default_str();
  generate_command->add_flag("--logprobs", generate.log_probabilities, "Print each token's log-probability");
  generate_command->add_flag("--json", generate.json, "Print JSON");

  InspectArguments inspect;
  CLI::App* inspect_command = app.add_subcommand("inspect", "Show programs, memory, presets, checkpoints, reports");
  add_config(*inspect_command, inspect.config);
  inspect_command->add_flag("--program", inspect.program, "The layers' forward and backward programs");
  inspect_command->add_flag("--memory", inspect.memory, "Predicted memory of a training run");
  inspect_command->add_flag("--presets", inspect.presets, "The model presets");
  inspect_command->add_option("--checkpoint", inspect.checkpoint, "Tensors and state of a checkpoint");
  inspect_command->add_option("--report", inspect.report, "Rebuild report.html of a run folder");
  inspect_command->add_flag("--json", inspect.json, "Print JSON");

  DoctorArguments doctor;
  CLI::App* doctor_command = app.add_subcommand("doctor", "What this machine has and how fast it is");
  doctor_command->add_flag("--json", doctor.json, "Print JSON");

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kUserErrorCode;
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
    return tessera::add_and_run(argc, argv);
  } catch (const tessera::UserError& error) {
    std::cerr << "tessera: " << error.what() << "\n";
    return tessera::kUserErrorCode;
  } catch (const std::exception& error) {
    std::cerr << "tessera: internal error: " << error.what() << "\n";
    return tessera::kInternalErrorCode;
  }
}
