#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <limits>

#include "cli/commands.h"
#include "cli/number_options.h"
#include "core/config/config.h"
#include "core/error.h"
#include "core/limits.h"
#include "core/process/cpu_level.h"
#include "core/text/names.h"

namespace tessera {
namespace {

/// Counts of what stands in memory or in a command line; far beyond what is of use.
constexpr double kManyThings = 1 << 20;
constexpr double kManyThreads = 4096;
/// Positions and ids of tokens are I32.
constexpr double kManyTokens = std::numeric_limits<int32_t>::max();

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
  add_number(
      *command, "--ranks", &train.ranks,
      "Start this many ranks on this machine; 0: run as started (alone, or by mpirun, srun or "
      "torchrun)",
      between(0, kManyThings));
  command->add_option("--trace", train.trace,
                      "File for what all ranks did in the second and third step (Chrome JSON)");
  command->add_flag("--json", train.json, "With --print-config: as JSON");
  return command;
}

CLI::App* add_verify(CLI::App& app, VerifyArguments& verify) {
  CLI::App* command = app.add_subcommand(
      "verify",
      "Compare a configuration's layout with one rank, on the host and in F32: losses, gradients, "
      "weights. With run.device=cuda and one rank: the GPU with the host. With --static: prove the "
      "layout without running it");
  add_config(*command, verify.config);
  add_number(*command, "--ranks", &verify.ranks, "Ranks of the layout; 0: the fewest that it needs",
             between(0, kManyThings));
  CLI::Option* steps = add_number(*command, "--steps", &verify.steps, "Optimizer steps to compare",
                                  between(1, kManyThings));
  CLI::Option* tolerance = add_number(
      *command, "--tolerance", &verify.tolerance,
      "Largest relative error that agrees, of what is computed and sent in F32", above(0));
  CLI::Option* full =
      command->add_flag("--full", verify.full, "With the model's own sizes, not shrunk");
  command
      ->add_flag("--static", verify.proof,
                 "Run nothing: follow how each value of the programs is spread over the ranks, at "
                 "the model's own sizes")
      ->excludes(steps, tolerance, full);
  command->add_flag("--all", verify.all, "List every parameter; with --static, every value");
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
      add_number(*command, "--steps", &bench.steps,
                 "Steps, or passes over the block, that are timed", between(1, kManyThings));
  CLI::Option* warmup = add_number(*command, "--warmup", &bench.warmup, "Steps before those",
                                   between(0, kManyThings));
  CLI::Option* trace =
      command->add_option("--trace", bench.trace, "File for a trace of one more step");
  command
      ->add_flag("--tiles", bench.tiles,
                 "With --layer moe: time nothing, but print how a GPU's kernels cut the experts' "
                 "products into tiles, and what a cost model predicts of these and of others")
      ->needs(layer)
      ->excludes(steps, warmup, trace);
  command
      ->add_flag("--steps-only", bench.steps_only,
                 "Time whole steps and nothing else: not their operators, nor the host's part")
      ->excludes(layer, trace);
  command->add_option("--hardware", bench.hardware,
                      "Also predict the step, by the description of that hardware (see plan)");
  command
      ->add_option("--calibrate", bench.calibration,
                   "Time the operators of some models on this machine and write what was found "
                   "into this hardware file, the rest being that of --hardware")
      ->excludes(layer, steps, warmup, trace);
  command->add_flag("--json", bench.json, "Print JSON");
  return command;
}

CLI::App* add_plan(CLI::App& app, PlanArguments& plan) {
  CLI::App* command = app.add_subcommand(
      "plan",
      "Find the fastest layout of a configuration on hardware that need not be there, by "
      "simulating its steps; keys that the configuration sets stay as they are");
  add_config(*command, plan.config);
  add_number(*command, "--gpus", &plan.gpus, "Devices, each of which is a rank",
             between(1, kManyThings))
      ->required();
  command
      ->add_option("--hardware", plan.hardware,
                   "Hardware by name, or a file of bench --calibrate; an unknown name lists them")
      ->required();
  add_number(*command, "--top", &plan.top, "Layouts that are shown", between(1, kManyThings));
  CLI::Option* skew =
      add_number(*command, "--skew", &plan.skew,
                 "Rows that come to the fullest rank's experts, in those of balanced routing",
                 between(1, kManyThings));
  command
      ->add_option("--routing", plan.routing,
                   "Run folder, or its metrics.jsonl, whose last steps say what comes to experts "
                   "instead, layer by layer")
      ->excludes(skew);
  command->add_option("--slow-rank", plan.slow_ranks,
                      "Ranks that compute slower than others, such as 5=1.3: 1.3 times as long");
  command->add_option("--slow-link", plan.slow_links,
                      "Ranks whose links are slower, such as 5=4: all that it exchanges takes 4 "
                      "times as long");
  CLI::Option* explain = command->add_flag("--explain", plan.explain,
                                           "Search nothing: simulate the configuration as it is");
  command
      ->add_flag("!--without-limit", plan.must_fit,
                 "With --explain: also where it takes more memory than there is")
      ->needs(explain);
  command->add_option("--write", plan.write, "File for the best layout's whole configuration");
  command->add_option("--html", plan.html, "File for a drawing of its step");
  command->add_option("--trace", plan.trace,
                      "File for its step as a trace with memory over time (Chrome JSON)");
  command->add_option("--chakra", plan.chakra,
                      "Write its step for simulators of networks, as MLCommons Chakra's execution "
                      "traces: files PREFIX.<rank>.et, and PREFIX.groups.json");
  command->add_flag("--json", plan.json, "Print JSON");
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
  add_number(*command, "--sequence-length", &request.sequence_length,
             "Tokens of a window; 0: as trained", between(0, kManyTokens));
  add_number(*command, "--batch-size", &request.batch_size, "Windows evaluated together",
             between(1, kManyThings));
  add_number(*command, "--max-batches", &request.max_batches,
             "Stop after this many batches; 0: all", at_least(0));
  CLI::Option* ids =
      command->add_option("--input-ids", eval.input_ids,
                          "Sequences instead, as input_ids I64 [B, S] of a safetensors file");
  CLI::Option* logits =
      command->add_option("--logits", eval.logits, "Where the logits of those sequences go");
  ids->needs(logits);
  logits->needs(ids);
  command->add_option("--choices", eval.choices,
                      "Multiple-choice questions instead, as JSON lines with context, choices and "
                      "answer");
  add_allow_nonfinite(*command, request.allow_nonfinite,
                      "Take weights and losses that are NaN or infinite, and count them");
  command->add_flag("--json", eval.json, "Print JSON");
  return command;
}

CLI::App* add_generate(CLI::App& app, GenerateArguments& generate) {
  CLI::App* command = app.add_subcommand("generate", "Continue a text with a trained model");
  GenerateOptions& options = generate.options;
  command->add_option("checkpoint", generate.checkpoint, "Run folder or checkpoint")->required();
  add_device(*command, generate.device);
  command->add_option("--prompt", generate.prompt, "Text to continue; empty: a new document");
  add_number(*command, "--max-tokens", &options.max_tokens, "Most tokens to generate",
             between(0, kManyTokens));
  add_number(*command, "--temperature", &options.temperature, "0: always the most likely token",
             at_least(0));
  add_number(*command, "--top-k", &options.top_k, "Only the k most likely tokens; 0: all",
             at_least(0));
  add_number(*command, "--top-p", &options.top_p,
             "Only the most likely tokens of this total probability",
             {.min = 0, .max = 1, .min_open = true});
  add_number(*command, "--seed", &options.seed, "Seed of the choice", at_least(0));
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
  add_number(command, "--vocab-size", &options.vocab_size, "With --train: tokens of the vocabulary",
             between(1, kManyTokens))
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
  add_number(command, "--min-frequency", &options.min_frequency,
             "With --train: how often a pair must occur to be merged", at_least(1))
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
  add_number(*command, "--threads", &request.num_threads, "0: all cores", between(0, kManyThreads));
  add_number(*command, "--sync-seconds", &request.sync_seconds,
             "Time between states on the disk that a killed run is continued from", at_least(0));
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
  command->add_flag("--step", inspect.step, "A training step as a plan: tasks, lanes and memory");
  command->add_option("--step-html", inspect.step_html,
                      "Draw the step as a timeline into this HTML file");
  command->add_flag("--all", inspect.all, "Print all tasks of the step");
  command->add_flag("--passes", inspect.passes,
                    "What each of the compiler's passes made of the programs");
  command->add_option("--goal", inspect.goal, "With --passes: what for; default: train")
      ->check(CLI::IsMember({"train", "infer"}));
  add_number(
      *command, "--ranks", &inspect.ranks,
      "Ranks of the layout, also for --program, --passes and --memory; 0: as few as it needs",
      between(0, kManyThings));
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
  add_size(*command, "--shard-size", &convert.shard_bytes, "Most bytes of a file, e.g. 5GB");
  command->add_flag("--no-verify", convert.no_verify,
                    "Do not compare what was written with the source");
  add_number(*command, "--vocab-size", &convert.vocab_size,
             "To a checkpoint: pad the vocabulary with zeros to this size",
             between(0, kManyTokens));
  add_number(*command, "--pad-vocab-to", &convert.pad_vocab_to,
             "To a checkpoint: pad the vocabulary to a multiple", between(0, kManyTokens));
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
  add_number(*command, "--experts", &spec.copies,
             "Copies of each MLP; a layer has this times the granularity experts",
             between(1, kManyThings));
  add_number(*command, "--granularity", &spec.granularity, "Experts that a copy is cut into",
             between(1, kManyThings));
  add_number(*command, "--top-k", &spec.top_k, "Experts of a token, a multiple of the granularity",
             between(1, kManyThings));
  add_allow_nonfinite(*command, upcycle.allow_nonfinite,
                      "Take weights that are NaN or infinite, and note them");
  command->add_flag("--no-normalize", upcycle.no_normalize,
                    "Probabilities of a softmax over all experts, not scaled to sum 1");
  add_number(*command, "--router-deviation", &spec.router_deviation,
             "Deviation of the router's random weights; 0: 0.02, or 1e-6 without normalizing",
             at_least(0));
  add_number(*command, "--first-dense-layers", &spec.first_dense_layers,
             "Leading layers left dense", between(0, kManyThings));
  add_number(*command, "--every", &spec.every, "Every n-th layer after those gets experts",
             between(1, kManyThings));
  add_number(*command, "--seed", &spec.seed, "Seed of the router", at_least(0));
  command->add_flag("--json", upcycle.json, "Print JSON");
  return command;
}

CLI::App* add_doctor(CLI::App& app, DoctorArguments& doctor) {
  CLI::App* command = app.add_subcommand("doctor", "What this machine has and how fast it is");
  command->add_flag("--json", doctor.json, "Print JSON");
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

struct AllArguments {
  TrainArguments train;
  VerifyArguments verify;
  EvalArguments eval;
  GenerateArguments generate;
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
      {add_verify(app, all.verify), &all.verify.config, true,
       [&] { return run_verify(all.verify); }},
      {add_eval(app, all.eval), nullptr, true, [&] { return run_eval(all.eval); }},
      {add_generate(app, all.generate), nullptr, true, [&] { return run_generate(all.generate); }},
      {add_tokenize(app, all.tokenize), nullptr, false, [&] { return run_tokenize(all.tokenize); }},
      {add_inspect(app, all.inspect), &all.inspect.config, false,
       [&] { return run_inspect(all.inspect); }},
      {add_convert(app, all.convert), nullptr, true, [&] { return run_convert(all.convert); }},
      {add_upcycle(app, all.upcycle), nullptr, true, [&] { return run_upcycle(all.upcycle); }},
      {add_bench(app, all.bench), &all.bench.config, true, [&] { return run_bench(all.bench); }},
      {add_plan(app, all.plan), &all.plan.config, false, [&] { return run_plan(all.plan); }},
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
