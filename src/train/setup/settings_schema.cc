#include "model/config/limits.h"
#include "parallel/layout.h"
#include "train/setup/settings.h"

namespace tessera {
namespace {

constexpr int64_t kMaxBucketBytes = int64_t{1} << 40;
constexpr int64_t kMaxNewtonSchulzSteps = 100;
constexpr int64_t kMostHistory = 100'000;
/// Scales of the largest numbers that there are stay numbers.
constexpr int64_t kMostMargin = 6;

void add_run_options(ConfigSchema& schema, RunSettings& run) {
  schema.add("run.folder", &run.folder, "Where checkpoints, metrics and the report go");
  schema.add("run.init_from", &run.init_from,
             "Checkpoint, or run folder, whose model and weights a new run starts from; empty: "
             "random weights");
  schema.add("run.seed", &run.seed, "Seed of initial weights and data order", at_least(0));
  schema.add_enum(
      "run.device", &run.device,
      {{"auto", DeviceChoice::kAuto}, {"cpu", DeviceChoice::kCpu}, {"cuda", DeviceChoice::kCuda}},
      "Where to compute; auto: each rank takes a Hopper GPU of its own where there are enough, "
      "otherwise all take the CPU. CUDA_VISIBLE_DEVICES=1 makes another GPU the first");
  schema.add_enum(
      "run.cuda_graphs", &run.cuda_graphs,
      {{"auto", GraphMode::kAuto}, {"on", GraphMode::kOn}, {"off", GraphMode::kOff}},
      "Whether a GPU replays the work of layers that run again and again: auto: where it can be "
      "recorded; on: or else the run ends; off: kernels are launched one by one");
  schema.add_enum("run.resume", &run.resume,
                  {{"auto", ResumeMode::kAuto},
                   {"never", ResumeMode::kNever},
                   {"required", ResumeMode::kRequired}},
                  "Continue from the newest checkpoint of the folder: where there is one, never, "
                  "or in any case");
  schema.add("run.save", &run.save,
             "Save checkpoints; false: none at all, to see how fast a configuration trains");
  schema.add("run.checkpoint_interval", &run.checkpoint_interval,
             "Steps between checkpoints; 0: only at the end", between(0, kMaxSteps));
  schema.add("run.background_save", &run.background_save,
             "Train on while a checkpoint is written, from a copy of the state in the host's "
             "memory; false: steps wait for the disk");
  schema.add("run.keep_last", &run.keep_last, "Checkpoints that stay; 0: all",
             between(0, kMaxSteps));
  schema.add("run.log_interval", &run.log_interval, "Steps between lines on the console",
             between(1, kMaxSteps));
  schema.add("run.tensorboard", &run.tensorboard, "Write TensorBoard event files");
  schema.add(
      "run.comm_timeout", &run.comm_timeout,
      "Seconds that a rank waits for the others before all end; more than a checkpoint takes",
      above(0));
  schema.add("run.peer_memory", &run.peer_memory,
             "GPUs of a machine exchange what NCCL is behind with through memory that they all "
             "address; false: by NCCL alone");
  schema.add_enum(
      "run.shared_memory", &run.shared_memory,
      {{"auto", SharedMemory::kAuto}, {"off", SharedMemory::kOff}},
      "How ranks that are processes of one machine exchange large tensors of the host: auto: each "
      "reads the sender's memory, where the system lets it; off: by MPI or TCP, as between "
      "machines");
  schema.add_enum(
      "run.bind", &run.bind,
      {{"auto", RankBinding::kAuto},
       {"none", RankBinding::kNone},
       {"numa", RankBinding::kNuma},
       {"cores", RankBinding::kCores}},
      "Processors of a rank: numa: those of a NUMA node, near its GPU; cores: a share of "
      "these for each rank; auto: numa where a machine has several nodes, and what "
      "started the ranks has not bound them; none: any");
  schema.add("run.report", &run.report, "Write report.html");
}

void add_peer_options(ConfigSchema& schema, PeerSettings& peer) {
  schema.add("checkpoint.peer_copy", &peer.copy,
             "Of several ranks: keep each rank's state in files in memory, and a copy of the next "
             "rank's, from which a run whose ranks were lost goes on");
  schema.add("checkpoint.peer_interval", &peer.interval, "Steps between such copies",
             between(1, kMaxSteps));
  schema.add("checkpoint.peer_folder", &peer.folder,
             "Where they are kept: a folder in each machine's memory (tmpfs)");
}

void add_data_options(ConfigSchema& schema, DataSettings& data) {
  schema.add("data.text", &data.text,
             "Text or JSONL file, also compressed, or folder of such files, to train on");
  schema.add("data.tokens", &data.tokens,
             "Instead of text: prefix of a token file (Megatron .bin/.idx)");
  schema.add("data.blend", &data.blend,
             "Instead of either: weighted token files, each \"WEIGHT PREFIX\"");
  schema.add("data.blend_changes", &data.blend_changes,
             "Other blends from given steps on, each entry \"STEP: WEIGHT PREFIX\"");
  schema.add("data.tokenizer", &data.tokenizer,
             "Tokenizer: byte, a tokenizer.json, a SentencePiece .model, or a folder with either");
  schema.add("data.end_of_document", &data.end_of_document,
             "Token between documents, as text or id; empty: the tokenizer's own end of text");
  schema.add("data.separator", &data.separator,
             "Line that ends a document; empty: each file is one document");
  schema.add_enum(
      "data.format", &data.format,
      {{"auto", TextFormat::kAuto}, {"text", TextFormat::kText}, {"jsonl", TextFormat::kJsonl}},
      "What the files of data.text hold; auto: by the ending of their names");
  schema.add("data.json_key", &data.json_key, "In JSONL: the key of a document's text");
  schema.add("data.instructions", &data.instructions,
             "JSONL with prompt and completion, or messages: only what the model is to say carries "
             "loss");
  schema.add("data.cache", &data.cache,
             "Folder of token files made from text; empty: <run.folder>/tokens");
  schema.add("data.sequence_length", &data.sequence_length, "Tokens of a sequence",
             between(1, kMaxLength));
  schema.add("data.validation_fraction", &data.validation_fraction,
             "Share of the tokens held out for validation", from_below(0, 1));
  schema.add_enum("data.packing", &data.packing,
                  {{"stream", Packing::kStream}, {"best_fit", Packing::kBestFit}},
                  "How documents fill sequences: one after the other, cut anywhere; or whole "
                  "where they fit, the rest padded. dpo and rl: each answer in a sequence of its "
                  "own; or several in one");
  schema.add("data.split_documents", &data.split_documents,
             "Keep attention, positions and loss within a document");
}

void add_train_options(ConfigSchema& schema, TrainSettings& train) {
  schema.add_enum(
      "train.objective", &train.objective,
      {{"next_token", Objective::kNextToken}, {"dpo", Objective::kDpo}, {"grpo", Objective::kGrpo}},
      "What is trained for; `tessera dpo` and `tessera rl` set the latter two");
  schema.add("train.steps", &train.steps, "Optimizer steps", between(1, kMaxSteps));
  schema.add("train.micro_batch", &train.micro_batch, "Sequences of one forward and backward pass",
             between(1, kMaxSequences));
  schema.add("train.global_batch", &train.global_batch, "Sequences of one optimizer step",
             between(1, kMaxSequences));
  schema.add_enum(
      "train.precision", &train.precision,
      {{"f32", Precision::kF32},
       {"bf16", Precision::kBF16},
       {"fp16", Precision::kFp16},
       {"fp8", Precision::kFp8}},
      "Storage of weights and activations; bf16 keeps F32 masters; fp16: f32, whose "
      "layers' products read F16, with scaled losses (precision.loss_scale); fp8: bf16, "
      "whose layers' products read rounded numbers, by precision.recipe");
  schema.add("train.recompute", &train.recompute,
             "Values computed again in the backward pass instead of kept: names, or \"all\" for "
             "everything possible, perhaps of some layers: \"expert_act@0-5\"");
  schema.add(
      "train.offload", &train.offload,
      "Values that wait in the host's memory from the forward to the backward pass: names, or "
      "\"all\", perhaps of some layers: \"expert_pre@0-5\"");
  schema.add("train.offload_rate", &train.offload_rate,
             "GB/s that the way to the host's memory carries, each way at once; copies are planned "
             "with it",
             above(0));
  schema.add_enum(
      "train.stash", &train.stash, {{"none", StashMode::kNone}, {"auto", StashMode::kAuto}},
      "Where rows that came to experts wait for the backward pass if the host does not learn their "
      "number (parallel.exchange): none: in memory for the worst routing, of each layer and "
      "micro-batch; auto: in pages that all share, in memory for train.stash_factor");
  schema.add("train.stash_factor", &train.stash_factor,
             "Memory of train.stash, as a multiple of what balanced routing needs; a step that "
             "needs more is done again with more",
             between(1, kMaxStashFactor));
  schema.add("train.stash_page", &train.stash_page,
             "Rows of hidden states that are as many bytes as a page of train.stash",
             between(1, kMaxStashPage));
  schema.add(
      "train.memory_limit", &train.memory_limit,
      "Memory that a rank may take of its device, as `inspect --memory` predicts it, such as "
      "\"80GiB\": what does not fit is recomputed or offloaded, the cheapest first; auto: what a "
      "GPU has free, unless train.recompute or train.offload say what to do; none: only these");
  schema.add(
      "train.schedule", &train.schedule,
      "as_built: passes one behind the other, by parallel.pipeline_schedule; merged: the forward "
      "pass of a micro-batch merged with the backward pass of another, so that one computes while "
      "the other's tokens travel, with more micro-batches at a time; auto: whichever is faster as "
      "simulated on train.hardware; or a file with every stage's passes, as `inspect --schedule` "
      "prints them");
  schema.add("train.hardware", &train.hardware,
             "Hardware that train.schedule = \"auto\" simulates steps on: a name or file as for "
             "`tessera plan --hardware`; auto: the GPU's own, and passes as built on CPUs");
  schema.add("train.max_grad_norm", &train.max_grad_norm,
             "Global norm that gradients are clipped to; 0: not clipped", at_least(0));
  schema.add_enum(
      "train.on_nonfinite", &train.on_nonfinite,
      {{"stop", NonFinite::kStop}, {"skip", NonFinite::kSkip}},
      "When loss or gradient is NaN or infinite: stop, or skip the update and count it");
  schema.add("train.validation_interval", &train.validation_interval,
             "Steps between validations; 0: only at the end", between(0, kMaxSteps));
  schema.add("train.validation_batches", &train.validation_batches,
             "Micro-batches of a validation; 0: all", between(0, kMaxSteps));
}

void add_dpo_options(ConfigSchema& schema, DpoSettings& dpo) {
  schema.add(
      "dpo.pairs", &dpo.pairs,
      "For `tessera dpo`: JSON lines of {\"prompt\": ..., \"chosen\": ..., \"rejected\": ...}");
  schema.add("dpo.beta", &dpo.beta,
             "How strongly DPO holds the model to the one that it starts from", above(0));
}

void add_export_options(ConfigSchema& schema, WeightExportSettings& exports) {
  schema.add("rl.export_to", &exports.folder,
             "Folder, in /dev/shm perhaps, for versions of the weights as Hugging Face's folders, "
             "for an engine outside; empty: none");
  schema.add(
      "rl.export_like", &exports.like,
      "A folder of Hugging Face, or a checkpoint made from one, whose config.json, tokenizer "
      "and layout they have; empty: run.init_from, if it is such a checkpoint");
  schema.add("rl.export_interval", &exports.interval,
             "Steps between versions; the weights that a run begins and ends with are always one",
             between(1, kMaxSteps));
  schema.add("rl.export_keep", &exports.keep_last, "How many versions stay there, the newest",
             between(1, kMaxSteps));
  schema.add_enum("rl.export_failure", &exports.on_failure,
                  {{"stop", ExportFailure::kStop}, {"go_on", ExportFailure::kGoOn}},
                  "What a run does where weights could not be handed over: end with an error, or "
                  "note it and try again with the next version");
  schema.add("rl.vllm_url", &exports.vllm_url,
             "A vLLM server, as http://host:port, that loads each version of rl.export_to; empty: "
             "none");
  schema.add_choice("rl.vllm_way", &exports.vllm_way, {"reload", "disk"},
                    "How it is told: reload: reload_weights by /collective_rpc; disk: a weight "
                    "transfer, where it was started with that backend");
  schema.add_choice("rl.vllm_pause", &exports.vllm_pause, {"wait", "abort", "keep"},
                    "What becomes of requests under way: they are waited for, aborted, or kept and "
                    "continued with the new weights over the old keys and values");
  schema.add("rl.vllm_timeout", &exports.vllm_timeout, "Seconds that each request to it may take",
             above(0));
}

void add_rl_options(ConfigSchema& schema, RlSettings& rl) {
  schema.add_choice(
      "rl.task", &rl.task, {"arithmetic", "copy", "digits"},
      "For `tessera rl`: a task with prompts and rewards of its own; arithmetic: sums "
      "of two numbers; copy: the prompt's letters again; digits: as many digits as "
      "possible");
  schema.add(
      "rl.prompts", &rl.prompts,
      "Instead of a task's prompts: JSON lines of {\"prompt\": ...}, whatever else a line has "
      "being for rl.reward_command");
  schema.add("rl.reward_command", &rl.reward_command,
             "Instead of a task's rewards: a command that is given JSON lines of prompt and "
             "completion, and answers a number a line");
  schema.add("rl.reward_timeout", &rl.reward_timeout, "Seconds that it may take for a rollout",
             above(0));
  schema.add("rl.group_size", &rl.group_size,
             "Answers to each prompt, whose rewards are compared; of train.global_batch answers",
             between(2, kMaxSequences));
  schema.add("rl.max_tokens", &rl.max_tokens, "Tokens of an answer, at most",
             between(1, kMaxLength));
  schema.add("rl.temperature", &rl.temperature, "Of the answers' tokens; 1: as the model has them",
             above(0));
  schema.add("rl.clip_low", &rl.clip_low,
             "A token that has become less likely than 1 minus this, relative to when it was "
             "written, is pushed down no further",
             between(0, 1));
  schema.add("rl.clip_high", &rl.clip_high,
             "A token that has become likelier than 1 plus this is pushed up no further",
             at_least(0));
  schema.add("rl.kl_coefficient", &rl.kl_coefficient,
             "Weight of the divergence (k3) from the model that the run starts from; 0: none, and "
             "no memory for that model",
             at_least(0));
  schema.add("rl.updates", &rl.updates, "Steps on each rollout (GRPO's mu)", between(1, kMaxSteps));
  schema.add_enum("rl.advantage", &rl.advantage,
                  {{"grpo", AdvantageKind::kGrpo}, {"dr_grpo", AdvantageKind::kDrGrpo}},
                  "Reward minus the group's mean, divided by its standard deviation (grpo) or not");
  schema.add_enum("rl.average", &rl.average,
                  {{"tokens", LossAverage::kTokens}, {"sequences", LossAverage::kSequences}},
                  "Whether each token of the step counts alike, or each answer");
  schema.add("rl.router_replay", &rl.router_replay,
             "Train with the experts that tokens went to while they were written");
  add_export_options(schema, rl.exports);
}

/// Named as Megatron-LM's.
void add_loss_scale_options(ConfigSchema& schema, LossScaling& scaling) {
  schema.add("precision.loss_scale", &scaling.constant,
             "With fp16: what losses are multiplied by, and gradients divided by; 0: dynamic, from "
             "precision.initial_loss_scale on",
             between(0, kLargestLossScale));
  schema.add("precision.initial_loss_scale", &scaling.initial,
             "Of a dynamic loss scale: the first, a power of two", between(1, kLargestLossScale));
  schema.add("precision.min_loss_scale", &scaling.minimum,
             "Likewise: it becomes no smaller; where gradients overflow with it the run stops, or "
             "with train.on_nonfinite = \"skip\" goes on",
             between(1, kLargestLossScale));
  schema.add("precision.loss_scale_window", &scaling.window,
             "Likewise: steps in a row with finite gradients after which it doubles",
             between(1, kMaxSteps));
  schema.add("precision.hysteresis", &scaling.hysteresis,
             "Likewise: steps whose gradients overflow, and are skipped, until it is halved; "
             "counted anew when it doubles",
             between(1, kMaxSteps));
}

void add_precision_options(ConfigSchema& schema, PrecisionSettings& precision) {
  std::vector<std::string> names;
  std::string help = "With train.precision = \"fp8\": how operands of products are rounded";
  for (const Recipe& recipe : recipes()) {
    names.emplace_back(recipe.name);
    help += fmt::format("; {}: {}", recipe.name, recipe.what);
  }
  schema.add_choice("precision.recipe", &precision.recipe, std::move(names), help);
  schema.add("precision.plain", &precision.plain,
             "Weights whose products stay as train.precision stores them: names, or their "
             "beginnings, or \"all\", perhaps "
             "of some layers: \"attn\", \"moe.experts.down@3\", \"all@0-1\"");
  schema.add("precision.weight_gradients", &precision.weight_gradients,
             "Whether the products that give weights' gradients read rounded numbers too, instead "
             "of what is stored");
  schema.add(
      "precision.weight_copies", &precision.weight_copies,
      "Where the GPU multiplies FP8, and with fp16: keep what weights are rounded to for all "
      "micro-batches of a step, 2 bytes more for each, instead of rounding them in each");
  schema.add_enum("precision.saved", &precision.saved,
                  {{"bf16", SavedPrecision::kBf16},
                   {"fp8", SavedPrecision::kFp8},
                   {"fp8_all", SavedPrecision::kFp8All}},
                  "What the gradients of weights read of tokens; fp8: what the products before "
                  "them read, which is kept for the backward pass, and sent to experts, in FP8; "
                  "fp8_all: likewise, and what the gradients of activations read is FP8 too");
  schema.add_enum("precision.primary_weights", &precision.fp8_weights,
                  {{"bf16", false}, {"fp8", true}},
                  "With recipe blockwise: fp8 keeps no BF16 values of weights that only rounded "
                  "products read; each update casts them from the F32 masters, and ranks send FP8");
  schema.add("precision.emulate", &precision.emulate,
             "Multiply rounded numbers in BF16 also where the GPU multiplies FP8");
  DelayedScaling& delayed = precision.delayed;
  schema.add("precision.amax_history", &delayed.history,
             "With recipe tensorwise_delayed: steps whose largest values a scale is made of",
             between(1, kMostHistory));
  schema.add_enum("precision.amax_algorithm", &delayed.choice,
                  {{"max", AmaxChoice::kMax}, {"most_recent", AmaxChoice::kMostRecent}},
                  "Likewise: of these the largest, or the newest");
  schema.add("precision.amax_margin", &delayed.margin,
             "Likewise: powers of two that values may grow by before they are beyond their scale",
             between(0, kMostMargin));
  schema.add_enum("precision.overflow", &delayed.overflows, {{"saturate", false}, {"skip", true}},
                  "Likewise: values beyond their scale become the largest number, or the step is "
                  "skipped; they are counted");
  add_loss_scale_options(schema, precision.loss_scaling);
}

void add_optimizer_options(ConfigSchema& schema, Settings& settings) {
  schema.add_enum("optim.name", &settings.optimizer_kind,
                  {{"adamw", OptimizerKind::kAdamW}, {"muon", OptimizerKind::kMuon}},
                  "What updates the weights; muon: Muon the matrices of hidden layers and the "
                  "routers, AdamW embedding, head, norms and biases");
  ScheduleSpec& schedule = settings.schedule;
  schema.add("optim.learning_rate", &schedule.peak_lr, "Learning rate after warm-up", above(0));
  schema.add_enum("optim.schedule", &schedule.kind,
                  {{"constant", ScheduleKind::kConstant},
                   {"cosine", ScheduleKind::kCosine},
                   {"linear", ScheduleKind::kLinear},
                   {"wsd", ScheduleKind::kWsd}},
                  "Learning rate after warm-up; wsd: stable, then decay");
  schema.add("optim.warmup_steps", &schedule.warmup_steps, "Steps of linear warm-up",
             between(0, kMaxSteps));
  schema.add("optim.min_lr_ratio", &schedule.min_lr_ratio,
             "Final learning rate relative to the peak", between(0, 1));
  schema.add("optim.decay_fraction", &schedule.decay_fraction,
             "Share of the steps that wsd decays over", between(0, 1));
  schema.add_enum("optim.decay_shape", &schedule.decay_shape,
                  {{"linear", DecayShape::kLinear}, {"one_minus_sqrt", DecayShape::kOneMinusSqrt}},
                  "How wsd decays");
  OptimizerOptions& options = settings.optimizer;
  schema.add("optim.beta1", &options.beta1, "AdamW's first moment", from_below(0, 1));
  schema.add("optim.beta2", &options.beta2, "AdamW's second moment", from_below(0, 1));
  schema.add("optim.eps", &options.eps, "AdamW's epsilon", above(0));
  schema.add("optim.weight_decay", &options.weight_decay, "Decoupled weight decay", at_least(0));
  schema.add("optim.decay_all", &options.decay_all,
             "Decay norms and biases too, not only matrices");
  schema.add("optim.qk_clip", &settings.qk_clip,
             "QK clip: heads with a larger attention logit in a step have their query and key "
             "weights scaled down behind the update, so that it would be this; 0: no clip",
             at_least(0));
  std::vector<std::pair<std::string, MomentKind>> kinds;
  for (const MomentKind kind :
       {MomentKind::kF32, MomentKind::kBF16, MomentKind::kF16, MomentKind::kFp8})
    kinds.emplace_back(moment_name(kind), kind);
  schema.add_enum("optim.first_moment", &options.formats.first_moment, kinds,
                  "How AdamW's first moments are kept between steps; all but f32 are rounded "
                  "stochastically, f16 and fp8 have a scale for 128 elements of a row");
  schema.add_enum("optim.second_moment", &options.formats.second_moment, kinds,
                  "The same of its second moments");
  schema.add_enum(
      "optim.master", &options.formats.master,
      {{"f32", MasterKind::kF32},
       {"remainder", MasterKind::kRemainder},
       {"remainder8", MasterKind::kRemainder8},
       {"none", MasterKind::kNone}},
      "What is kept beside BF16 weights: an F32 copy, the 16 bits that the weight lacks "
      "of one, the upper 8 of these, rounded stochastically, or nothing, the weights then being "
      "rounded stochastically");
}

void add_muon_options(ConfigSchema& schema, MuonOptions& muon) {
  schema.add("optim.muon_momentum", &muon.momentum,
             "What Muon's average of gradients keeps in a step", from_below(0, 1));
  schema.add("optim.muon_nesterov", &muon.nesterov,
             "Let Muon look ahead by the step's own gradient (Nesterov)");
  schema.add("optim.muon_ns_steps", &muon.ns_steps,
             "Steps of Newton and Schulz's iteration that orthogonalize Muon's updates",
             between(1, kMaxNewtonSchulzSteps));
}

void add_shard_options(ConfigSchema& schema, ShardSettings& shard) {
  schema.add_enum(
      "optim.shard", &shard.scope,
      {{"none", ShardScope::kNone}, {"state", ShardScope::kState}, {"full", ShardScope::kFull}},
      "What the ranks that hold a weight alike share out: nothing, optimizer state "
      "(ZeRO-1), or weights and gradients too (FSDP)");
  schema.add("optim.shard_group", &shard.group,
             "Data-parallel ranks that share one copy of the model, with shard = full; the others "
             "hold further copies; 0: all share one",
             between(0, kMaxRanks));
  schema.add("optim.reduce_group", &shard.reduce_group,
             "Neighbouring ranks (of a node) that sum gradients before others do, with shard = "
             "none or state; 1: all ranks at once",
             between(1, kMaxRanks));
  schema.add_enum("optim.gradient_compression", &shard.compression,
                  {{"none", GradientCompression::kNone}, {"bf16", GradientCompression::kBf16}},
                  "How gradients travel between ranks; sums are F32 in any case");
  schema.add("optim.bucket_bytes", &shard.bucket_bytes,
             "F32 bytes of gradients that travel together, with shard = none or state",
             between(1, kMaxBucketBytes));
  schema.add_enum("optim.gradients", &shard.gradients,
                  {{"f32", DType::kF32}, {"bf16", DType::kBF16}},
                  "In what the gradients of layers' weights are kept. What a layer's backward pass "
                  "of a micro-batch adds up in f32 is added to bf16 with one rounding, and between "
                  "ranks they travel as bf16. Those of embedding, last norm and head are f32");
  schema.add(
      "optim.release_gradients", &shard.release_gradients,
      "Update each layer as soon as its gradients are complete, and let all layers' "
      "gradients have the same memory: without clipping, on several ranks with shard = state "
      "and two layers' memory; with several micro-batches, all pass forward before all pass "
      "backward, layer by layer");
  schema.add("optim.offload", &shard.state_on_host,
             "Keep the optimizer's state in the host's memory, from where it comes to the device "
             "for the updates, with shard = none or state");
  schema.add_enum("optim.update", &shard.updates_on_host, {{"device", false}, {"host", true}},
                  "Who updates with offload = true: the device, to which the state comes, or the "
                  "host's threads, to which gradients go and from which weights come back, with "
                  "name = adamw");
}

}  // namespace

ConfigSchema make_schema(Settings& settings) {
  ConfigSchema schema;
  std::vector<std::string> names = {""};
  for (const Preset& preset : presets()) names.push_back(preset.name);
  schema.add_choice("model.preset", &settings.preset, std::move(names),
                    "Shapes to start from; see inspect --presets");
  add_model_options(schema, settings.model);
  add_lora_options(schema, settings.model.lora);
  add_data_options(schema, settings.data);
  add_train_options(schema, settings.train);
  add_dpo_options(schema, settings.dpo);
  add_rl_options(schema, settings.rl);
  add_precision_options(schema, settings.precision);
  add_optimizer_options(schema, settings);
  add_muon_options(schema, settings.optimizer.muon);
  add_shard_options(schema, settings.shard);
  add_parallel_options(schema, settings.parallel);
  add_run_options(schema, settings.run);
  add_peer_options(schema, settings.peer);
  return schema;
}

}  // namespace tessera
