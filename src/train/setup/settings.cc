#include "train/setup/settings.h"

#include "core/config/byte_size.h"
#include "core/error.h"
#include "model/config/limits.h"
#include "parallel/layout.h"
#include "train/setup/blend_settings.h"
#include "train/setup/context_batches.h"
#include "train/setup/precision_rules.h"
#include "train/setup/step_schedule.h"

namespace tessera {
namespace {

void validate_capacity(const Settings& settings) {
  const MoeConfig& moe = settings.model.moe;
  const int64_t num_tokens = settings.train.micro_batch * settings.data.sequence_length;
  require(
      moe.num_experts == 0 || !moe.experts_choose() || num_tokens * moe.top_k >= moe.num_experts,
      "moe.routing = \"expert_choice\" leaves {} experts less than a token each ({} tokens of a "
      "micro-batch, moe.top_k {}); use longer sequences or a larger train.micro_batch",
      moe.num_experts, num_tokens, moe.top_k);
  if (moe.num_experts == 0 || moe.capacity_factor == 0) return;
  const double even = static_cast<double>(num_tokens) * static_cast<double>(moe.top_k) *
                      static_cast<double>(moe.capacity_group_size) /
                      static_cast<double>(moe.num_experts);
  require(even * moe.capacity_factor >= 1,
          "moe.capacity_factor {} leaves {} {:.3g} tokens, under 1 ({} tokens of a micro-batch, "
          "moe.top_k {}, moe.num_experts {}); it must be at least {:.3g}",
          moe.capacity_factor,
          moe.capacity_group_size == 1 ? "an expert"
                                       : fmt::format("{} experts", moe.capacity_group_size),
          even * moe.capacity_factor, num_tokens, moe.top_k, moe.num_experts, 1 / even);
}

void validate_data(const DataSettings& data) {
  if (!data.blend.empty() || !data.blend_changes.empty()) {
    parse_blend(data.blend, data.blend_changes);
  }
  require(!data.text.empty() || !data.tokens.empty() || !data.blend.empty(),
          "no data: set data.text to a text file or folder, data.tokens to the prefix of a token "
          "file, or data.blend to several of them");
  require(data.text.empty() || data.tokens.empty(),
          "data.text ({}) and data.tokens ({}) are both set; keep one", data.text, data.tokens);
  const std::string& other = data.text.empty() ? data.tokens : data.text;
  require(data.blend.empty() || other.empty(), "data.blend and data.{} ({}) are both set; keep one",
          data.text.empty() ? "tokens" : "text", other);
}

}  // namespace

std::string_view precision_name(Precision precision) {
  switch (precision) {
    case Precision::kF32:
      return "f32";
    case Precision::kBF16:
      return "bf16";
    case Precision::kFp16:
      return "fp16";
    case Precision::kFp8:
      return "fp8";
  }
  throw InternalError("unknown precision");
}

SavedPolicy TrainSettings::saved_policy() const {
  SavedPolicy policy = {
      .recompute = parse_recompute(recompute),
      .offload = {.entries = parse_offload(offload), .link_bytes = offload_rate * 1e9}};
  if (stashes()) policy.stash = StashPolicy{.factor = stash_factor, .page_rows = stash_page};
  return policy;
}

ProductPrecision Settings::products() const {
  if (train.precision == Precision::kFp16) {
    return {.recipe = &f16_recipe(),
            .plain = parse_plain(precision.plain),
            .plain_weight_gradients = !precision.weight_gradients,
            .keeps_rounded = true};
  }
  if (train.precision != Precision::kFp8) return {};
  return {.recipe = &find_recipe(precision.recipe),
          .plain = parse_plain(precision.plain),
          .plain_weight_gradients = !precision.weight_gradients,
          .fp8_products = !precision.emulate,
          .keeps_rounded = precision.saved != SavedPrecision::kBf16,
          .keeps_all_rounded = precision.saved == SavedPrecision::kFp8All,
          .delayed = precision.delayed};
}

std::optional<int64_t> TrainSettings::parse_memory_limit() const {
  const bool given =
      !memory_limit.empty() && memory_limit != kDeviceLimit && memory_limit != "none";
  if (!given) return std::nullopt;
  return parse_byte_size("train.memory_limit", memory_limit);
}

ShardingOptions ShardSettings::replicated() const {
  return {.shard_state = scope == ShardScope::kState,
          .bucket_bytes = bucket_bytes,
          .reduction = {.compression = compression},
          .release_gradients = release_gradients,
          .state_on_host = state_on_host,
          .updates_on_host = updates_on_host};
}

FullShardingOptions ShardSettings::full() const {
  return {.compression = compression};
}

void validate_state_formats(const Settings& settings) {
  const StateFormats& formats = settings.optimizer.formats;
  const MasterKind master = formats.master;
  require(
      master == MasterKind::kF32 || settings.train.dtype() != DType::kF32,
      "optim.master = \"{}\" is for BF16 weights, but train.precision is \"{}\", with which "
      "weights are their own masters; set train.precision = \"bf16\", or leave optim.master out",
      master == MasterKind::kNone ? "none" : master_suffix(master),
      precision_name(settings.train.precision));
}

void validate_optimizer(const Settings& settings) {
  if (settings.optimizer_kind == OptimizerKind::kMuon) return;
  const MuonOptions& muon = settings.optimizer.muon;
  const MuonOptions plain;
  const auto refuse = [](bool is_set, std::string_view key) {
    require(!is_set,
            "{} is set, but optim.name is \"adamw\", which has no use for it; set optim.name = "
            "\"muon\", or leave it out",
            key);
  };
  refuse(muon.momentum != plain.momentum, "optim.muon_momentum");
  refuse(muon.nesterov != plain.nesterov, "optim.muon_nesterov");
  refuse(muon.ns_steps != plain.ns_steps, "optim.muon_ns_steps");
}

void validate_dpo(const Settings& settings) {
  require(!settings.dpo.pairs.empty(),
          "no pairs: set dpo.pairs to a file of JSON lines with prompt, chosen and rejected");
  require(settings.train.global_batch % 2 == 0,
          "train.global_batch is {}; with dpo it must be even, since each pair is two sequences",
          settings.train.global_batch);
}

void validate_exports(const WeightExportSettings& exports) {
  require(exports.vllm_url.empty() || !exports.folder.empty(),
          "rl.vllm_url is {}, but rl.export_to is empty: the server loads versions of the weights "
          "from a folder that it sees under the same path; set rl.export_to, to one in /dev/shm on "
          "the same machine",
          exports.vllm_url);
  require(exports.like.empty() || !exports.folder.empty(),
          "rl.export_like is {}, but rl.export_to is empty; set the folder that weights go to, or "
          "leave rl.export_like out",
          exports.like);
}

void validate_rl(const Settings& settings) {
  validate_exports(settings.rl.exports);
  const RlSettings& rl = settings.rl;
  const TrainSettings& train = settings.train;
  require(train.global_batch % rl.group_size == 0,
          "train.global_batch is {}, of answers; it must be a multiple of rl.group_size {}, the "
          "answers to each prompt",
          train.global_batch, rl.group_size);
  require(rl.max_tokens < settings.data.sequence_length,
          "rl.max_tokens is {}, but a prompt and its answer must fit in data.sequence_length {}",
          rl.max_tokens, settings.data.sequence_length);
  require(rl.prompts.empty() || !rl.reward_command.empty(),
          "rl.prompts is {}, but nothing says what answers to them are worth; set "
          "rl.reward_command",
          rl.prompts);
  require(
      train.steps % rl.updates == 0 && settings.run.checkpoint_interval % rl.updates == 0,
      "rl.updates is {}; train.steps {} and run.checkpoint_interval {} must be multiples, since "
      "a run continues with a new rollout",
      rl.updates, train.steps, settings.run.checkpoint_interval);
  require(!rl.router_replay || settings.model.moe.num_experts > 0,
          "rl.router_replay is set, but the model has no experts; leave it out");
  const MoeConfig& moe = settings.model.moe;
  require(!rl.router_replay || (moe.top_p == 1 && moe.routing == Routing::kTopK),
          "rl.router_replay gives each token moe.top_k experts, and {} chooses others; leave one "
          "out",
          moe.top_p < 1 ? "moe.top_p" : "moe.routing = \"sinkhorn\"");
}

/// What needs all gradients of a step at a time cannot be had where they are released.
void validate_release(const Settings& settings) {
  if (!settings.shard.release_gradients) return;
  const TrainSettings& train = settings.train;
  constexpr std::string_view kWhy =
      "with optim.release_gradients layers are updated before all "
      "gradients are there";
  require(train.max_grad_norm == 0,
          "train.max_grad_norm is {}, but {}, so that their norm comes too late to clip by; set "
          "train.max_grad_norm = 0",
          train.max_grad_norm, kWhy);
  require(!settings.parallel.split_weights,
          "parallel.split_weights is set, with which weight gradients of a layer come behind those "
          "of the one before, but {}; leave parallel.split_weights out",
          kWhy);
  require(train.on_nonfinite == NonFinite::kStop,
          "train.on_nonfinite is \"skip\", but {}, so that a step cannot be left out; set "
          "train.on_nonfinite = \"stop\"",
          kWhy);
}

void validate_host_updates(const Settings& settings) {
  if (!settings.shard.updates_on_host) return;
  require(settings.shard.state_on_host,
          "optim.update is \"host\", but optim.offload is false, with which the state is in the "
          "device's memory; set optim.offload = true, or optim.update = \"device\"");
  require(
      settings.optimizer_kind == OptimizerKind::kAdamW,
      "optim.update = \"host\" is for optim.name = \"adamw\", and optim.name is \"muon\", whose "
      "products of matrices would take the host's threads far longer than a device takes with "
      "state that is streamed; set optim.update = \"device\"");
}

void validate_qk_clip(const Settings& settings) {
  if (settings.qk_clip == 0) return;
  for (int64_t layer = 0; layer < settings.model.num_layers; ++layer) {
    require(settings.model.is_attention_layer(layer),
            "optim.qk_clip is {}, but layer {} has no attention, and no logits to clip; leave "
            "optim.qk_clip out",
            settings.qk_clip, layer);
  }
  const QkNorm norm = settings.model.qk_norm;
  require(norm != QkNorm::kHead && norm != QkNorm::kL2,
          "optim.qk_clip is {}, but model.qk_norm is \"{}\": queries and keys are normed head by "
          "head, so that scaling their weights changes no logit, and the norms bound the logits; "
          "leave optim.qk_clip out",
          settings.qk_clip, norm == QkNorm::kHead ? "head" : "l2");
  require(
      settings.model.window_kv_heads == 0 && settings.model.window_heads == 0 &&
          settings.model.window_head_size == 0,
      "optim.qk_clip is {}, but layers with a window have heads of their own "
      "(model.window_heads, model.window_kv_heads, model.window_head_size), whose rows it would "
      "not find; leave one of them out",
      settings.qk_clip);
  require(!settings.model.keys_as_values,
          "optim.qk_clip is {}, but with model.keys_as_values its factors would change values too; "
          "leave one of them out",
          settings.qk_clip);
  require(!settings.shard.release_gradients,
          "optim.qk_clip is {}, but with optim.release_gradients layers are updated before all "
          "ranks' logits are known; leave one of them out",
          settings.qk_clip);
}

/// What is planned for passes one behind the other.
void validate_schedule(const Settings& settings) {
  const TrainSettings& train = settings.train;
  if (step_schedule(train) == StepSchedule::kFile) {
    require(!settings.shard.release_gradients,
            "train.schedule is a file, but optim.release_gradients has an order of its own; leave "
            "one out");
  }
  if (!merges_passes(train)) return;
  const auto refuse = [&](bool wrong, std::string_view key) {
    require(!wrong,
            "train.schedule = \"{}\" merges passes, which does not go together with {} yet; "
            "leave one out",
            train.schedule, key);
  };
  refuse(settings.parallel.split_weights, "parallel.split_weights");
  refuse(step_schedule(train) == StepSchedule::kMerged &&
             settings.parallel.schedule == PipelineKind::kGpipe,
         "parallel.pipeline_schedule = \"gpipe\"");
  refuse(settings.shard.scope == ShardScope::kFull, "optim.shard = \"full\"");
  refuse(settings.shard.release_gradients, "optim.release_gradients");
  refuse(settings.shard.gradients != DType::kF32, "optim.gradients in fewer bits");
  refuse(!train.offload.empty(), "train.offload");
}

/// What reads what a layer kept more than once, or uses gradients before a step is known to be
/// whole.
void validate_stash(const Settings& settings) {
  const TrainSettings& train = settings.train;
  if (!train.stashes()) return;
  const auto refuse = [](bool wrong, std::string_view key, std::string_view why) {
    require(!wrong, "train.stash = \"auto\" does not go together with {}: {}", key, why);
  };
  refuse(settings.parallel.split_weights, "parallel.split_weights",
         "weights' gradients would read once more what came back from the stash; leave one out");
  refuse(settings.shard.release_gradients, "optim.release_gradients",
         "layers would be updated before it is known that all rows found room; leave one out");
  refuse(train.parse_memory_limit().has_value(),
         fmt::format("train.memory_limit = \"{}\"", train.memory_limit),
         "what a limit would have recomputed or offloaded is chosen of values that are kept in "
         "place; name values in train.recompute or train.offload instead");
}

void validate_gradients(const Settings& settings) {
  if (settings.shard.gradients == DType::kF32) return;
  require(
      settings.optimizer_kind != OptimizerKind::kMuon,
      "optim.gradients = \"bf16\" is for AdamW, but optim.name is \"muon\", whose averages take "
      "gradients in f32; leave optim.gradients out");
  require(
      !settings.shard.release_gradients,
      "optim.gradients = \"bf16\" has nothing to keep with optim.release_gradients, which keeps "
      "no gradients of layers; leave one of them out");
}

/// What would train, copy or round weights that are frozen, or their adapters.
void validate_adapters(const Settings& settings) {
  const LoraConfig& lora = settings.model.lora;
  if (!lora.is_on()) return;
  const auto refuse = [&](bool wrong, std::string_view key, std::string_view why) {
    require(!wrong, "lora.rank is {}, which does not go with {}: {}", lora.rank, key, why);
  };
  refuse(settings.train.precision == Precision::kFp8, "train.precision = \"fp8\"",
         "products beside adapters are not rounded; set train.precision = \"bf16\"");
  refuse(settings.optimizer_kind == OptimizerKind::kMuon, "optim.name = \"muon\"",
         "it is for whole matrices; leave optim.name out");
  refuse(settings.qk_clip > 0, "optim.qk_clip",
         "it scales query and key weights, which are frozen; leave it out");
  refuse(settings.shard.scope == ShardScope::kFull, "optim.shard = \"full\"",
         "frozen weights are whole on each rank; set optim.shard = \"state\"");
  refuse(settings.parallel.clone_experts > 0, "parallel.clone_experts",
         "clones have no adapters; set it to 0");
}

void validate_layer_scalars(const Settings& settings) {
  require(!settings.model.layer_scalars || settings.shard.scope != ShardScope::kFull,
          "model.layer_scalars are not trained, and optim.shard = \"full\" spreads trained weights "
          "alone; set optim.shard = \"state\"");
}

void validate_hash_tables(const Settings& settings) {
  require(
      settings.model.moe.hash_layers.empty() || settings.shard.scope != ShardScope::kFull,
      "the tables of moe.hash_layers are not trained, and optim.shard = \"full\" spreads trained "
      "weights alone; set optim.shard = \"state\"");
}

/// What an indexer, whose weights are not trained, does not go with.
void validate_indexer(const Settings& settings) {
  const int64_t top_k = settings.model.index.top_k;
  if (top_k == 0) return;
  require(settings.shard.scope != ShardScope::kFull,
          "index.top_k is {}, whose indexer is not trained, and optim.shard = \"full\" spreads "
          "trained weights alone; set optim.shard = \"state\"",
          top_k);
  require(
      settings.qk_clip == 0,
      "optim.qk_clip is {}, but with index.top_k {} tokens see some keys alone, and the largest "
      "logits are measured of all; leave one of them out",
      settings.qk_clip, top_k);
}

/// The largest logits are measured of keys that all heads' queries see.
void validate_compression(const Settings& settings) {
  require(settings.qk_clip == 0 || !settings.model.is_compressed(),
          "optim.qk_clip is {}, which scales the rows of query and key projections, but "
          "model.attention is \"compressed\", whose queries and keys are normed behind them; set "
          "optim.qk_clip to 0",
          settings.qk_clip);
}

/// The step that a token's loss is weighted in must be the one whose probabilities were found.
void validate_objective(const Settings& settings) {
  const Objective objective = settings.train.objective;
  if (objective == Objective::kNextToken) return validate_data(settings.data);
  const std::string_view name = objective == Objective::kDpo ? "dpo" : "grpo";
  const auto refuse = [&](bool is_set, std::string_view key, std::string_view why) {
    require(!is_set, "{} is set, but train.objective is \"{}\", {}; leave it out", key, name, why);
  };
  const DataSettings& data = settings.data;
  refuse(!data.text.empty(), "data.text", "which has data of its own");
  refuse(!data.tokens.empty(), "data.tokens", "which has data of its own");
  refuse(!data.blend.empty(), "data.blend", "which has data of its own");
  const int64_t interval = settings.train.validation_interval;
  // The default stands in the configuration that a run writes, and says nothing.
  refuse(interval > 0 && interval != TrainSettings().validation_interval,
         "train.validation_interval", "which holds nothing out to validate on");
  require(settings.model.mtp_layers == 0,
          "model.mtp_layers is set, but train.objective is \"{}\", which says nothing of tokens "
          "further on; set it to 0, which leaves its layers out",
          name);
  refuse(settings.model.moe.num_experts > 0 && settings.model.moe.capacity_factor > 0,
         "moe.capacity_factor", "for which tokens' probabilities are found without dropping any");
  refuse(settings.model.moe.num_experts > 0 && settings.model.moe.experts_choose(),
         "moe.routing = \"expert_choice\"",
         "for which tokens' probabilities must not depend on later ones");
  if (objective == Objective::kDpo) validate_dpo(settings);
  if (objective == Objective::kGrpo) validate_rl(settings);
}

void validate(const Settings& settings) {
  const TrainSettings& train = settings.train;
  require(train.global_batch % train.micro_batch == 0,
          "train.global_batch {} is not a multiple of train.micro_batch {}; the nearest is {}",
          train.global_batch, train.micro_batch,
          (train.global_batch / train.micro_batch + 1) * train.micro_batch);
  train.saved_policy();
  train.parse_memory_limit();
  validate_objective(settings);
  require(!settings.run.folder.empty(), "run.folder is empty");
  require(!settings.peer.copy || settings.peer.folder.starts_with('/'),
          "checkpoint.peer_folder is \"{}\"; it must be an absolute path, since each machine has "
          "one, such as /dev/shm",
          settings.peer.folder);
  validate_precision(settings);
  validate_capacity(settings);
  validate_state_formats(settings);
  validate_optimizer(settings);
  validate_release(settings);
  validate_host_updates(settings);
  validate_qk_clip(settings);
  validate_adapters(settings);
  validate_layer_scalars(settings);
  validate_hash_tables(settings);
  validate_indexer(settings);
  validate_compression(settings);
  validate_schedule(settings);
  validate_stash(settings);
  validate_gradients(settings);
  validate_contexts(settings);
  require(settings.schedule.warmup_steps <= train.steps,
          "optim.warmup_steps {} exceeds train.steps {}", settings.schedule.warmup_steps,
          train.steps);
  validate(settings.schedule);
}

}  // namespace tessera
