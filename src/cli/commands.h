#pragma once

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "core/process/standard_output.h"
#include "data/text/tokenize.h"
#include "hf/convert.h"
#include "hf/upcycle.h"
#include "serve/server.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/train_bpe.h"
#include "train/infer/generate.h"
#include "train/infer/loaded_model.h"
#include "train/state/checkpointing.h"

namespace tessera {

/// A configuration as given on the command line.
struct ConfigArguments {
  std::string file;                    ///< TOML; "" for defaults only
  std::vector<std::string> overrides;  ///< "--section.key=value"
};

struct TrainArguments {
  ConfigArguments config;
  int64_t ranks = 0;  ///< local ones to start; 0: this process is one of those that are there
  std::string trace;  ///< file for a trace; empty: none
  std::vector<std::string> command;  ///< this command line without --ranks
  bool print_config = false;
  bool json = false;
};

struct VerifyArguments {
  ConfigArguments config;
  int64_t ranks = 0;  ///< 0: as many as the layout needs
  int64_t steps = 3;
  double tolerance = 1e-4;
  bool full = false;
  bool proof = false;  ///< nothing is run
  bool all = false;
  bool json = false;
};

struct GenerateArguments {
  std::string checkpoint;
  DeviceChoice device = DeviceChoice::kAuto;
  std::string prompt;
  std::string prompts;  ///< JSON lines of several; "" for the one
  int64_t samples = 1;  ///< texts of each prompt
  int64_t max_sequences = 64;
  GenerateOptions options;
  bool log_probabilities = false;
  bool allow_nonfinite = false;
  bool json = false;
};

struct ServeArguments {
  std::string checkpoint;
  DeviceChoice device = DeviceChoice::kAuto;
  std::string model_name;    ///< empty: that of the checkpoint's folder
  std::string api_key_file;  ///< empty: clients need no key
  ServerOptions server;
  DecodingLimits limits;
  int64_t max_tokens = 256;
  ChatFormat chat = ChatFormat::kNone;
  bool allow_nonfinite = false;
};

struct EvalArguments {
  std::string checkpoint;
  DeviceChoice device = DeviceChoice::kAuto;
  EvaluationRequest request;
  std::string choices;    ///< JSON lines of multiple-choice questions; "" for none
  std::string input_ids;  ///< safetensors file of sequences whose logits are wanted; "" for none
  std::string logits;     ///< file that they are written to
  bool json = false;
};

/// A tokenizer to be learned from the text.
struct TokenizerTraining {
  std::string path;  ///< of the tokenizer.json to write; empty: none is learned
  BpeTrainingOptions options;
};

struct TokenizeArguments {
  TokenizeRequest request;  ///< except for its progress
  TokenizerSpec tokenizer = {.path = "", .end_of_document = ""};
  TokenizerTraining training;
  bool json = false;
};

struct InspectArguments {
  ConfigArguments config;
  bool presets = false;
  bool program = false;
  bool memory = false;
  bool layout = false;
  bool schedule = false;
  bool contexts = false;
  std::string hardware = "epyc-core";  ///< of the contexts
  bool step = false;
  std::string step_html;  ///< file for the step as a timeline; "" for none
  bool all = false;       ///< of a step's tasks; otherwise long plans are cut
  bool passes = false;
  std::string goal;   ///< of the passes: "train", "infer", or "" for training
  int64_t ranks = 0;  ///< of the layout; 0: as few as its degrees need
  std::string checkpoint;
  std::string report;
  bool json = false;
};

struct ConvertArguments {
  std::string source;
  std::string target;
  std::string to;     ///< "hf", "tessera", or "" to see from the source
  std::string dtype;  ///< "f32", "bf16", or "" for the source's
  int64_t shard_bytes = int64_t{5} * 1000 * 1000 * 1000;
  bool no_verify = false;
  int64_t vocab_size = 0;
  int64_t pad_vocab_to = 0;
  bool drop_mtp = false;
  bool allow_nonfinite = false;
  std::string family;
  std::string like;
  std::string experts;  ///< "split", "fused", or "" for as they came
  bool adapters = false;
  bool json = false;
};

struct UpcycleArguments {
  std::string source;
  std::string target;
  UpcycleSpec spec;
  bool no_normalize = false;
  bool allow_nonfinite = false;
  bool json = false;
};

struct BenchArguments {
  ConfigArguments config;
  std::string layer;  ///< "moe", "mlp" or "attention": time this block; empty: whole steps
  int64_t steps = 5;
  int64_t warmup = 2;
  std::string trace;        ///< file for a trace of one step; empty: none
  bool tiles = false;       ///< only predict the tiles of the layer's grouped products
  bool steps_only = false;  ///< of whole steps nothing but their time and memory
  std::string hardware;     ///< whose clock predicts the step, or that a calibration begins with
  std::string calibration;  ///< hardware file to write; empty: none
  bool json = false;
};

struct PlanArguments {
  ConfigArguments config;
  std::string hardware;
  int64_t gpus = 1;
  int64_t top = 5;
  double skew = 1;
  std::string routing;                  ///< a run whose routing is taken; empty: balanced
  std::vector<std::string> slow_ranks;  ///< "5=1.3": computes 1.3 times as long
  std::vector<std::string> slow_links;  ///< likewise what it exchanges
  std::vector<std::string> exposed;     ///< groups whose exchanges nothing hides
  std::string graphs;                   ///< what the device repeats; empty: as configured
  std::vector<std::string> pipelined;   ///< groups whose exchanges travel beside their products
  std::vector<std::string> operator_shares;  ///< "attention=0.35": of the rates
  bool stored_scores = false;                ///< attention stores its scores
  double launch_us = 0;                      ///< of an operator by itself; 0: the hardware's
  double launch_expert_us = 0;               ///< more for each expert of products
  bool explain = false;                      ///< the given layout alone
  bool must_fit = true;                      ///< also where it is explained
  std::string write;                         ///< file for the best configuration; empty: none
  std::string html;                          ///< file for a drawing; likewise
  std::string trace;                         ///< file for a trace; likewise
  std::string chakra;  ///< how the names of files for simulators of networks begin; likewise
  bool json = false;
  std::function<void()> pause = {};  ///< see search_plan
};

struct DoctorArguments {
  bool json = false;
};

/// Reads a command line, runs its subcommand and returns the exit code; what the user did wrong is
/// thrown as UserError.
int run_command_line(int argc, char** argv, StandardOutput& output);

/// Each runs one subcommand and returns the exit code; what the user did wrong is thrown as
/// UserError.
int run_train(const TrainArguments& arguments, StandardOutput& output);
/// The same of preferences (`dpo`) and of rewards (`rl`).
int run_tune(const TrainArguments& arguments, Objective objective, StandardOutput& output);
/// For `train` on a rank whose command line or configuration cannot be used: tells the other ranks,
/// so that all end at once with one message, and returns the exit code. Throws UserError with `why`
/// where there are no others.
int refuse_rank(const std::string& why);
/// These print to `out`, as JSON where they are asked to.
int run_verify(const VerifyArguments& arguments, std::ostream& out);
int run_plan(const PlanArguments& arguments, std::ostream& out);
int run_generate(const GenerateArguments& arguments);
/// Several texts at once, as JSON lines.
int run_generate_batch(const GenerateArguments& arguments);
int run_serve(const ServeArguments& arguments);
int run_eval(const EvalArguments& arguments);
/// Learns a byte-level byte-pair encoding from the documents of a source and writes it.
void train_tokenizer(const TokenizerTraining& training, const TextSource& source, bool quiet);
int run_tokenize(const TokenizeArguments& arguments);
int run_inspect(const InspectArguments& arguments);
/// How the ranks of the layout share the documents of the data's first steps.
void show_contexts(Settings settings, const InspectArguments& arguments);
/// Prints what a training step does, as the first rank of each pipeline stage.
void show_step(const Settings& settings, int64_t num_ranks, const InspectArguments& arguments);
int run_convert(const ConvertArguments& arguments);
/// The work of it, which tells its progress and prints nothing but notes on skipped checkpoints.
ConvertReport convert_model(const ConvertArguments& arguments, const ConvertProgress& progress);
int run_upcycle(const UpcycleArguments& arguments);
int run_bench(const BenchArguments& arguments);
int run_doctor(const DoctorArguments& arguments);

/// Tells on standard error what does not belong among a command's results.
void print_notes(const std::vector<std::string>& notes);
/// Tells of newer checkpoints that were passed over.
void print_skipped(const OpenedCheckpoint& opened);

/// Every configuration key with its type, default and meaning.
std::string config_help();

}  // namespace tessera
