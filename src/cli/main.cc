#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
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
  command
      ->add_option("--ranks", train.ranks,
                   "Start so many ranks on this machine; 0: run as started (alone, or by mpirun, "
                   "srun or torchrun)")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--trace", train.trace,
                      "File for what all ranks did in the second and third step (Chrome JSON)");
  command->add_flag("--json", train.json, "With --print-config: as JSON");
  return command;
}

CLI::App* add_verify(CLI::App& app, VerifyArguments& verify) {
  CLI::App* command = app.add_subcommand(
      "verify",
      "Compare a configuration's layout with one rank, on the host and in F32: losses, gradients, "
      "weights. With run.device=cuda and one rank: the GPU with the host");
  add_config(*command, verify.config);
  command->add_option("--ranks", verify.ranks, "Ranks of the layout; 0: the fewest that it needs")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--steps", verify.steps, "Optimizer steps to compare")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command
      ->add_option("--tolerance", verify.tolerance,
                   "Largest relative error that agrees, of what is computed and sent in F32")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_flag("--full", verify.full, "With the model's own sizes, not shrunk");
  command->add_flag("--all", verify.all, "List every parameter");
  command->add_flag("--json", verify.json, "Print JSON");
  return command;
}

CLI::App* add_bench(CLI::App& app, BenchArguments& bench) {
  CLI::App* command = app.add_subcommand(
      "bench",
      "Time a configuration's training steps, or one block of a layer, operator by operator");
  add_config(*command, bench.config);
  CLI::Option* layer = command->add_option(
      "--layer", bench.layer,
      "Time only this block of one layer, forward and backward, on random hidden "
      "states: moe, mlp or attention");
  layer->check(CLI::IsMember({"moe", "mlp", "attention"}));
  CLI::Option* steps =
      command->add_option("--steps", bench.steps, "Steps, or passes over the block, that are timed")
          ->check(CLI::PositiveNumber)
          ->capture_default_str();
  CLI::Option* warmup = command->add_option("--warmup", bench.warmup, "Steps before those")
                            ->check(CLI::NonNegativeNumber)
                            ->capture_default_str();
  CLI::Option* trace =
      command->add_option("--trace", bench.trace, "File for a trace of one more step");
  command
      ->add_flag("--tiles", bench.tiles,
                 "With --layer moe: time nothing, but print how a GPU's kernels cut the experts' "
                 "products into tiles, and what a cost model predicts of these and of others")
      ->needs(layer)
      ->excludes(steps, warmup, trace);
  command->add_flag("--json", bench.json, "Print JSON");
  return command;
}

void add_device(CLI::App& command, DeviceChoice& device) {
  command
      .add_option("--device", device,
                  "Where it computes; auto: on the first GPU where the kernels run on it")
      ->transform(CLI::CheckedTransformer(
          std::map<std::string, DeviceChoice>{{"auto", DeviceChoice::kAuto},
                                              {"cpu", DeviceChoice::kCpu},
                                              {"cuda", DeviceChoice::kCuda}}))
      ->option_text("TEXT:{auto,cpu,cuda}=auto");
}

void add_allow_nonfinite(CLI::App& command, bool& allow, const char* help) {
  command.add_flag("--allow-nonfinite", allow, help);
}

CLI::App* add_eval(CLI::App& app, EvalArguments& eval) {
  CLI::App* command =
      app.add_subcommand("eval", "Loss, perplexity and bits per byte of text under a model");
  EvaluationRequest& request = eval.request;
  command->add_option("checkpoint", eval.checkpoint, "Run folder or checkpoint")->required();
  add_device(*command, eval.device);
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
  CLI::Option* ids =
      command->add_option("--input-ids", eval.input_ids,
                          "Sequences instead, as input_ids I64 [B, S] of a safetensors file");
  CLI::Option* logits =
      command->add_option("--logits", eval.logits, "Where the logits of those sequences go");
  ids->needs(logits);
  logits->needs(ids);
  add_allow_nonfinite(*command, request.allow_nonfinite,
                      "Take weights and losses that are NaN or infinite, and count them");
  command->add_option("--choices", eval.choices,
                      "Multiple-choice questions instead, as JSON lines with context, choices and "
                      "answer");
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
  add_device(*command, generate.device);
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
  add_allow_nonfinite(*command, generate.allow_nonfinite, "Take weights that are NaN or infinite");
  command->add_flag("--logprobs", generate.log_probabilities, "Print each token's log-probability");
  command->add_flag("--json", generate.json, "Print JSON");
  return command;
}

void add_tokenizer_training(CLI::App& command, TokenizerTraining& training,
                            CLI::Option& tokenizer) {
  CLI::Option* train =
      command
          .add_option("--train", training.path,
                      "First learn a byte-level BPE from the inputs and write it to this "
                      "tokenizer.json; without --output, do no more")
          ->excludes(&tokenizer);
  BpeTrainingOptions& options = training.options;
  command.add_option("--vocab-size", options.vocab_size, "With --train: tokens of the vocabulary")
      ->capture_default_str()
      ->needs(train);
  command
      .add_option("--split", options.split,
                  "With --train: how text becomes words: gpt2, qwen or llama3")
      ->capture_default_str()
      ->needs(train);
  command
      .add_option("--special-token", options.special_tokens,
                  "With --train: special tokens, the first for the end of a document")
      ->capture_default_str()
      ->needs(train);
  command
      .add_option("--min-frequency", options.min_frequency,
                  "With --train: how often a pair must occur to be merged")
      ->capture_default_str()
      ->needs(train);
}

CLI::App* add_tokenize(CLI::App& app, TokenizeArguments& tokenize) {
  CLI::App* command = app.add_subcommand(
      "tokenize", "Turn text and JSONL into a token file; the same command continues a killed one");
  TokenizeRequest& request = tokenize.request;
  TextSource& source = request.source;
  command
      ->add_option(
          "inputs", source.paths,
          "Text (.txt, ...) and JSONL (.jsonl, .ndjson) files, also compressed (.gz, .zst, "
          ".xz), or folders of them")
      ->required();
  command->add_option("-o,--output", request.prefix, "Prefix of the .bin and .idx files to write");
  CLI::Option* tokenizer = command->add_option(
      "--tokenizer", tokenize.tokenizer.path,
      "byte, a tokenizer.json, a SentencePiece .model, or a folder with either");
  add_tokenizer_training(*command, tokenize.training, *tokenizer);
  command->add_option("--end-of-document", tokenize.tokenizer.end_of_document,
                      "Token between documents, as text or id; default: the tokenizer's own");
  command
      ->add_option("--format", source.format,
                   "auto: by the ending of the name; text; or jsonl: a JSON object a line")
      ->transform(CLI::CheckedTransformer(std::map<std::string, TextFormat>{
          {"auto", TextFormat::kAuto}, {"text", TextFormat::kText}, {"jsonl", TextFormat::kJsonl}}))
      ->option_text("TEXT:{auto,text,jsonl}=auto");
  command->add_option("--separator", source.separator_line,
                      "In text: the line that ends a document, \"\" for a blank one; default: each "
                      "file is one document");
  command->add_option("--json-key", source.json_key, "In JSONL: the key of the text")
      ->capture_default_str();
  command->add_flag("--instructions", source.instructions,
                    "JSONL with prompt and completion, or messages: only completions, or what the "
                    "assistant says, carry loss");
  command->add_flag("--skip-invalid", source.skip_invalid,
                    "Count lines of JSONL that cannot be used and go on");
  command->add_option("--threads", request.num_threads, "0: all cores")->capture_default_str();
  command
      ->add_option("--sync-seconds", request.sync_seconds,
                   "Time between states on the disk that a killed run is continued from")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_flag_callback(
      "--overwrite", [&request] { request.other = OtherTokens::kReplace; },
      "Replace tokens of other text or options");
  command->add_flag("--json", tokenize.json, "Print JSON");
  return command;
}

CLI::App* add_inspect(CLI::App& app, InspectArguments& inspect) {
  CLI::App* command =
      app.add_subcommand("inspect", "Show programs, memory, presets, checkpoints, reports");
  add_config(*command, inspect.config);
  command->add_flag("--program", inspect.program, "The layers' forward and backward programs");
  command->add_flag("--memory", inspect.memory, "Predicted memory of a training run");
  command->add_flag("--layout", inspect.layout,
                    "Which rank does what under [parallel], and the pipeline's timeline");
  command->add_flag("--schedule", inspect.schedule, "Every pipeline stage's passes in their order");
  command
      ->add_option("--ranks", inspect.ranks,
                   "Ranks of the layout, also for --program and --memory; 0: as few as it needs")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_flag("--presets", inspect.presets, "The model presets");
  command->add_option("--checkpoint", inspect.checkpoint, "Tensors and state of a checkpoint");
  command->add_option("--report", inspect.report, "Rebuild report.html of a run folder");
  command->add_flag("--json", inspect.json, "Print JSON");
  return command;
}

CLI::App* add_convert(CLI::App& app, ConvertArguments& convert) {
  CLI::App* command = app.add_subcommand(
      "convert", "Turn a Hugging Face model into a checkpoint, or a checkpoint into such a model");
  command->add_option("source", convert.source, "Hugging Face folder, checkpoint or run folder")
      ->required();
  command->add_option("target", convert.target, "New folder")->required();
  command->add_option("--to", convert.to, "Direction; default: what the source is not")
      ->check(CLI::IsMember({"hf", "tessera"}));
  command->add_option("--dtype", convert.dtype, "Type of matrix weights; default: the source's")
      ->check(CLI::IsMember({"f32", "bf16"}));
  command->add_option("--shard-size", convert.shard_bytes, "Most bytes of a file, e.g. 5GB")
      ->transform(CLI::AsSizeValue(true))
      ->check(CLI::PositiveNumber);
  command->add_flag("--no-verify", convert.no_verify,
                    "Do not compare what was written with the source");
  command
      ->add_option("--vocab-size", convert.vocab_size,
                   "To a checkpoint: pad the vocabulary with zeros to this size")
      ->check(CLI::NonNegativeNumber);
  command
      ->add_option("--pad-vocab-to", convert.pad_vocab_to,
                   "To a checkpoint: pad the vocabulary to a multiple")
      ->check(CLI::NonNegativeNumber);
  add_allow_nonfinite(*command, convert.allow_nonfinite,
                      "Take weights that are NaN or infinite, and note them");
  command->add_flag("--drop-mtp", convert.drop_mtp,
                    "Leave out the layers of multi-token prediction");
  command->add_option("--family", convert.family,
                      "To Hugging Face: model type; default: one that expresses the model");
  command->add_option("--like", convert.like,
                      "To Hugging Face: folder whose config.json, tokenizer and layout to use");
  command
      ->add_option("--experts", convert.experts,
                   "To Hugging Face: one tensor per expert, or fused ones as in transformers 5")
      ->check(CLI::IsMember({"split", "fused"}));
  command->add_flag("--json", convert.json, "Print JSON");
  return command;
}

CLI::App* add_upcycle(CLI::App& app, UpcycleArguments& upcycle) {
  CLI::App* command = app.add_subcommand(
      "upcycle", "Turn a dense model into one of experts that starts with the same outputs");
  UpcycleSpec& spec = upcycle.spec;
  command
      ->add_option("source", upcycle.source, "Dense checkpoint, run folder or Hugging Face folder")
      ->required();
  command->add_option("target", upcycle.target, "New checkpoint")->required();
  command
      ->add_option("--experts", spec.copies,
                   "Copies of each MLP; a layer has this times the granularity experts")
      ->capture_default_str();
  command->add_option("--granularity", spec.granularity, "Experts that a copy is cut into")
      ->capture_default_str();
  command->add_option("--top-k", spec.top_k, "Experts of a token, a multiple of the granularity")
      ->capture_default_str();
  add_allow_nonfinite(*command, upcycle.allow_nonfinite,
                      "Take weights that are NaN or infinite, and note them");
  command->add_flag("--no-normalize", upcycle.no_normalize,
                    "Probabilities of a softmax over all experts, not scaled to sum 1");
  command
      ->add_option("--router-deviation", spec.router_deviation,
                   "Deviation of the router's random weights; 0: 0.02, or 1e-6 without normalizing")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--first-dense-layers", spec.first_dense_layers, "Leading layers left dense")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--every", spec.every, "Every n-th layer after those gets experts")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--seed", spec.seed, "Seed of the router")
      ->check(refuse_negative)
      ->capture_default_str();
  command->add_flag("--json", upcycle.json, "Print JSON");
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

int parse_and_run(int argc, char** argv) {
  CLI::App app{"Tessera trains Mixture-of-Experts language models."};
  app.name("tessera");
  app.require_subcommand(1);
  app.set_version_flag("--version", TESSERA_VERSION);
  TrainArguments train;
  VerifyArguments verify;
  EvalArguments eval;
  GenerateArguments generate;
  TokenizeArguments tokenize;
  InspectArguments inspect;
  ConvertArguments convert;
  UpcycleArguments upcycle;
  BenchArguments bench;
  DoctorArguments doctor;
  const CLI::App* train_command = add_train(app, train);
  const CLI::App* verify_command = add_verify(app, verify);
  const CLI::App* eval_command = add_eval(app, eval);
  const CLI::App* generate_command = add_generate(app, generate);
  const CLI::App* tokenize_command = add_tokenize(app, tokenize);
  const CLI::App* inspect_command = add_inspect(app, inspect);
  const CLI::App* convert_command = add_convert(app, convert);
  const CLI::App* upcycle_command = add_upcycle(app, upcycle);
  const CLI::App* bench_command = add_bench(app, bench);
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
  train.command = without_ranks(argc, argv);
  take_overrides(*verify_command, verify.config);
  take_overrides(*inspect_command, inspect.config);
  take_overrides(*bench_command, bench.config);
  if (*train_command) return run_train(train);
  if (*verify_command) return run_verify(verify);
  if (*eval_command) return run_eval(eval);
  if (*generate_command) return run_generate(generate);
  if (*tokenize_command) return run_tokenize(tokenize);
  if (*inspect_command) return run_inspect(inspect);
  if (*convert_command) return run_convert(convert);
  if (*upcycle_command) return run_upcycle(upcycle);
  if (*bench_command) return run_bench(bench);
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
