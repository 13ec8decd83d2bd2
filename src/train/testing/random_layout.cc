#include "train/testing/random_layout.h"

#include <algorithm>
#include <filesystem>
#include <set>

#include "comm/planned_world.h"
#include "ops/registry/cpu_kernels.h"
#include "train/setup/context_batches.h"
#include "train/setup/replica_groups.h"
#include "train/setup/training_data.h"
#include "train/testing/draw.h"
#include "train/testing/layout_runs.h"
#include "train/testing/random_mixers.h"
#include "train/verify/verify.h"

namespace tessera::testing {
namespace {

bool is_layout(const LayoutSpec& layout, int64_t num_ranks) {
  try {
    const Layout valid(layout, num_ranks);
    return true;
  } catch (const UserError&) {
    return false;
  }
}

/// Any orders of the axes in which both factorings have the same stages, PP between others too.
void draw_orders(Draw& draw, RandomLayout& result) {
  LayoutSpec& layout = result.settings.parallel.layout;
  do {
    layout.dense_order = draw.order({"tp", "cp", "dp", "pp"});
    layout.expert_order = draw.order({"etp", "ep", "edp", "pp"});
  } while (!is_layout(layout, result.num_ranks));
}

void draw_degrees(Draw& draw, int64_t max_ranks, RandomLayout& result) {
  ParallelSpec& parallel = result.settings.parallel;
  LayoutSpec& layout = parallel.layout;
  do {
    layout.tp = draw.of<int64_t>({1, 1, 2, 2, 3, 4});
    layout.cp = draw.of<int64_t>({1, 1, 2, 2, 3, 4});
    layout.pp = draw.of<int64_t>({1, 1, 2, 2, 3, 4});
    layout.dp = draw.of<int64_t>({1, 1, 2, 3, 4});
    result.num_ranks = layout.tp * layout.cp * layout.pp * layout.dp;
  } while (result.num_ranks > max_ranks);
  const int64_t stage = layout.tp * layout.cp * layout.dp;
  layout.etp = draw.chance(3) ? draw.divisor(stage) : 1;
  if (layout.etp > 4) layout.etp = 1;
  layout.ep = draw.divisor(stage / layout.etp);
  if (draw.chance(2)) draw_orders(draw, result);
  parallel.attention = draw.chance(3) ? AttentionParallel::kUlysses : AttentionParallel::kTensor;
  parallel.context =
      draw.of({ContextExchange::kRing, ContextExchange::kAllToAll, ContextExchange::kHierarchical});
  const int64_t inner = draw.divisor(layout.cp);
  if (parallel.context == ContextExchange::kHierarchical) {
    parallel.context_inner = inner;
    if (inner == 1) parallel.context = ContextExchange::kRing;
  }
  parallel.dispatcher = draw.of({DispatcherRequest::kAuto, DispatcherRequest::kAllToAll,
                                 DispatcherRequest::kAllGather, DispatcherRequest::kDeduplicated,
                                 DispatcherRequest::kHierarchical});
  if (parallel.dispatcher == DispatcherRequest::kHierarchical) {
    parallel.dispatch_inner = draw.divisor(layout.ep);
    if (parallel.dispatch_inner == 1) parallel.dispatcher = DispatcherRequest::kDeduplicated;
  }
}

void draw_pipeline(Draw& draw, RandomLayout& result) {
  ParallelSpec& parallel = result.settings.parallel;
  ModelConfig& model = result.settings.model;
  parallel.schedule =
      draw.of({PipelineKind::kGpipe, PipelineKind::kOneFOneB, PipelineKind::kInterleaved});
  parallel.split_weights = draw.chance(3);
  const bool interleaved = parallel.schedule == PipelineKind::kInterleaved;
  parallel.chunks_per_stage = interleaved && parallel.layout.pp > 1 ? 2 : 1;
  const int64_t chunks = parallel.layout.pp * parallel.chunks_per_stage;
  model.num_layers = std::max<int64_t>(chunks, 2) + draw.upto(parallel.layout.pp + 1);
  if (parallel.layout.pp == 2 && parallel.chunks_per_stage == 1 && draw.chance(3))
    parallel.pipeline_layout = fmt::format("Et|t*{}L", model.num_layers - 1);
}

void draw_attention(Draw& draw, RandomLayout& result) {
  ModelConfig& model = result.settings.model;
  const LayoutSpec& layout = result.settings.parallel.layout;
  // Any exchange of heads is over at most this many ranks.
  const int64_t unit = layout.tp * layout.cp;
  model.num_heads = unit * (1 + draw.upto(2));
  model.num_kv_heads = draw.divisor(model.num_heads);
  model.hidden_size = 16 + 4 * draw.upto(3);
  model.head_size = draw.of<int64_t>({4, 6, 8});
  model.qkv_bias = draw.chance(3);
  model.output_bias = draw.chance(4);
  model.mlp_bias = draw.chance(4);
  model.qk_norm = draw.of({QkNorm::kNone, QkNorm::kNone, QkNorm::kHead, QkNorm::kAll});
  model.rope.interleaved = draw.chance(4);
  if (draw.chance(4)) {
    model.window = 3 + draw.upto(8);
    if (draw.chance(2)) model.window_layers = {draw.upto(model.num_layers)};
  }
  if (!draw.chance(4)) return;
  model.attention = AttentionKind::kLatent;
  model.qk_norm = QkNorm::kNone;
  model.num_kv_heads = 0;
  model.latent = {.query_rank = draw.of<int64_t>({0, 12}),
                  .kv_rank = 10,
                  .nope_size = 6,
                  .rope_size = 4,
                  .value_size = draw.of<int64_t>({6, 5})};
}

void draw_router(Draw& draw, MoeConfig& moe) {
  moe.score =
      draw.of({ScoreFunction::kSoftmax, ScoreFunction::kSigmoid, ScoreFunction::kSqrtSoftplus});
  moe.score_order = moe.score == ScoreFunction::kSoftmax && draw.chance(3)
                        ? ScoreOrder::kAfterTopK
                        : ScoreOrder::kBeforeTopK;
  moe.normalize_top_k = draw.chance(2);
  moe.score_scale = draw.of({1.0, 1.5});
  moe.balance_coefficient = draw.of({0.01, 0.1});
  moe.balance_scope = draw.of({BalanceTokens::kMicroBatch, BalanceTokens::kSequence,
                               BalanceTokens::kModel, BalanceTokens::kGlobalBatch});
  moe.z_loss_coefficient = draw.of({0.0, 0.01});
  moe.bias_update_speed = draw.of({0.0, 0.01});
  if (moe.num_experts % 2 == 0 && moe.num_experts >= 4 && draw.chance(4)) {
    moe.num_groups = 2;
    moe.top_groups = 1;
    moe.top_k = std::min(moe.top_k, moe.num_experts / 2);
  }
}

void draw_experts(Draw& draw, RandomLayout& result) {
  ModelConfig& model = result.settings.model;
  MoeConfig& moe = model.moe;
  const LayoutSpec& layout = result.settings.parallel.layout;
  model.activation = draw.of({Activation::kSwiGLU, Activation::kSwiGLU, Activation::kGelu});
  model.inner_size = layout.tp * (4 + draw.upto(5));
  moe.num_experts = draw.chance(8) ? 0 : layout.ep * (1 + draw.upto(3));
  if (moe.num_experts == 1) moe.num_experts = 3 * layout.ep;
  if (moe.num_experts == 0) {
    result.settings.parallel.layout.ep = result.settings.parallel.layout.etp = 1;
    return;
  }
  moe.top_k = 1 + draw.upto(std::min<int64_t>(moe.num_experts, 3));
  draw_router(draw, moe);
  moe.inner_size = layout.etp * (4 + 4 * draw.upto(2));
  moe.memory_efficient = !draw.chance(3);
  moe.fuse_gather = draw.of({GatherFusion::kAuto, GatherFusion::kAlways, GatherFusion::kNever});
  moe.fuse_activation = draw.chance(2);
  if (draw.chance(4)) {
    moe.experts = ExpertPath::kBlockSparse;
    moe.block_size = 8;
    moe.inner_size = layout.etp * moe.block_size * (1 + draw.upto(2));
    moe.memory_efficient = true;
  } else if (draw.chance(4)) {
    for (int64_t e = 0; e < moe.num_experts; ++e)
      moe.inner_sizes.push_back(layout.etp * (2 + draw.upto(4)));
  }
  moe.first_dense_layers = draw.upto(2);
  moe.every = draw.of<int64_t>({1, 1, 2});
  if (draw.chance(2)) {
    moe.shared_inner_size = layout.tp * (3 + draw.upto(3));
    moe.shared_gate = draw.chance(2);
  }
  if (draw.chance(4)) {
    moe.capacity_factor = draw.of({0.8, 1.3});
    moe.capacity_scope = draw.of({CapacityScope::kSequence, CapacityScope::kSubSequence});
    moe.drop_policy = draw.of({DropPolicy::kProbs, DropPolicy::kPosition});
    if (draw.chance(2)) moe.capacity_group_size = draw.divisor(moe.num_experts);
    moe.pad_to_capacity = moe.capacity_group_size == 1 && draw.chance(3);
  }
  if (draw.chance(3)) moe.balance_group_size = draw.divisor(moe.num_experts);
  if (draw.chance(4)) moe.latent_size = 1 + draw.upto(model.hidden_size - 1);
}

void draw_biases(Draw& draw, RandomLayout& result) {
  ModelConfig& model = result.settings.model;
  model.attention_sinks = draw.chance(3);
  if (model.moe.num_experts == 0) return;
  model.moe.mlp_bias = draw.chance(3);
  model.moe.router_bias = draw.chance(3);
  if (draw.chance(4))
    model.activation = draw.of({Activation::kSwiGLUOai, Activation::kSwiGLUClamped});
}

/// What scales hidden states, scores and logits, and when heads are normed.
void draw_multipliers(Draw& draw, ModelConfig& model) {
  model.norm_after_rotation = model.qk_norm != QkNorm::kNone && draw.chance(3);
  if (!draw.chance(4)) return;
  model.embedding_multiplier = draw.of({1.0, 3.0});
  model.residual_multiplier = draw.of({1.0, 0.22});
  model.attention_multiplier = draw.of({0.0, 0.125});
  model.logits_divisor = draw.of({1.0, 6.0});
}

/// Slots for clones of hot experts, where nothing is drawn that they do not go with.
void draw_clones(Draw& draw, RandomLayout& result) {
  MoeConfig& moe = result.settings.model.moe;
  ParallelSpec& parallel = result.settings.parallel;
  const bool possible = parallel.layout.ep > 1 && parallel.layout.etp == 1 &&
                        moe.experts == ExpertPath::kGrouped && moe.inner_sizes.empty() &&
                        moe.capacity_factor == 0 &&
                        parallel.dispatcher != DispatcherRequest::kAllGather;
  if (!possible || !draw.chance(2)) return;
  parallel.clone_experts = 1 + draw.upto(2);
  parallel.exchange = ExchangeSizes::kExact;
}

void draw_training(Draw& draw, RandomLayout& result) {
  Settings& settings = result.settings;
  const LayoutSpec& layout = settings.parallel.layout;
  settings.model.vocab_size = 37 + draw.upto(8);
  settings.model.tie_embeddings = draw.chance(2);
  settings.model.init_deviation = 0.2;
  settings.data.sequence_length = 2 * layout.cp * layout.tp * (1 + draw.upto(2));
  settings.data.split_documents = draw.chance(2);
  settings.data.packing = draw.chance(3) ? Packing::kBestFit : Packing::kStream;
  if (settings.model.moe.drops_by_probability()) {
    // Few equal tokens, and no padding.
    settings.model.vocab_size += 4000;
    settings.data.packing = Packing::kStream;
  }
  settings.train.micro_batch = 1 + draw.upto(2);
  settings.train.global_batch =
      settings.train.micro_batch * layout.dp * (1 + draw.upto(layout.pp + 2));
  if (draw.chance(4)) settings.train.recompute = {"all"};
  settings.train.max_grad_norm = draw.of({0.0, 0.5});
  settings.shard.scope = draw.of({ShardScope::kNone, ShardScope::kState, ShardScope::kState,
                                  ShardScope::kFull, ShardScope::kFull, ShardScope::kFull});
  settings.shard.bucket_bytes = draw.of<int64_t>({1, 2000, 1 << 20});
  settings.optimizer.eps = 1e-3;
  settings.schedule.peak_lr = 1e-2;
  settings.schedule.kind = ScheduleKind::kConstant;
  settings.schedule.warmup_steps = 0;
  settings.run.seed = 1 + draw.upto(1000);
  if (draw.chance(3)) settings.optimizer_kind = OptimizerKind::kMuon;
}

/// Embedding, layers and loss in as many chunks as before, cut anywhere.
std::string draw_cuts(Draw& draw, const ModelConfig& model, int64_t num_chunks) {
  std::string text =
      fmt::format("E{}{}L", std::string(model.num_layers, 't'), std::string(model.mtp_layers, 'm'));
  std::set<int64_t> cuts;
  while (std::ssize(cuts) < num_chunks - 1) cuts.insert(1 + draw.upto(std::ssize(text) - 1));
  for (auto cut = cuts.rbegin(); cut != cuts.rend(); ++cut)
    text.insert(static_cast<size_t>(*cut), "|");
  return text;
}

void draw_prediction(Draw& draw, RandomLayout& result) {
  ModelConfig& model = result.settings.model;
  ParallelSpec& parallel = result.settings.parallel;
  if (!draw.chance(3)) return;
  model.mtp_layers = 1 + draw.upto(2);
  model.mtp_loss_coefficient = draw.of({0.3, 1.0});
  const int64_t num_chunks = parallel.layout.pp * parallel.chunks_per_stage;
  const bool given = !parallel.pipeline_layout.empty();
  if (num_chunks > 1 && (given || draw.chance(2)))
    parallel.pipeline_layout = draw_cuts(draw, model, num_chunks);
}

/// Where the norms that they then read are beside them.
void draw_normed_prediction(Draw& draw, Settings& settings) {
  const std::string& chunks = settings.parallel.pipeline_layout;
  const size_t first = chunks.find('m');
  const bool beside = first == std::string::npos || chunks.find('|', first) == std::string::npos;
  if (settings.model.mtp_layers > 0 && beside) settings.model.mtp_normed = draw.chance(2);
}

/// Everything or something, of all layers or some; slow ways keep copies under way for several
/// runs.
void draw_offload(Draw& draw, RandomLayout& result) {
  TrainSettings& train = result.settings.train;
  const int64_t last = draw.upto(result.settings.model.all_layers()) - 1;
  train.offload = draw.of<std::vector<std::string>>(
      {{"all"}, {fmt::format("all@0-{}", last)}, {"attn_norm", fmt::format("mlp_norm@{}", last)}});
  train.offload_rate = draw.of({50.0, 0.05, 0.005});
}

/// Experts that compute nothing, fewer than top_k experts, and loads that are evened out.
void draw_choice(Draw& draw, Settings& settings) {
  MoeConfig& moe = settings.model.moe;
  if (moe.num_experts == 0) return;
  if (moe.num_groups == 1 && draw.chance(5)) {
    moe.zero_experts = 1 + draw.upto(3);
    moe.balance_group_size = 1;
  }
  const bool shares =
      moe.score == ScoreFunction::kSoftmax && moe.score_order == ScoreOrder::kBeforeTopK;
  if (shares && draw.chance(4)) moe.top_p = draw.of({0.3, 0.7});
  if (!moe.has_expert_bias() && moe.num_groups == 1 && draw.chance(6))
    moe.routing = Routing::kSinkhorn;
  const bool whole = moe.capacity_factor == 0 && moe.top_p == 1 && moe.zero_experts == 0 &&
                     settings.parallel.clone_experts == 0;
  if (!whole || moe.has_expert_bias() || moe.num_groups > 1 || !draw.chance(8)) return;
  moe.routing = Routing::kExpertChoice;
  moe.score_order = ScoreOrder::kBeforeTopK;
  // Few equal tokens, and no padding.
  settings.model.vocab_size += 4000;
  settings.data.packing = Packing::kStream;
}

bool fits(const Settings& settings, int64_t num_ranks) {
  try {
    check_sharding(settings, Layout(settings.parallel.layout, num_ranks));
    return true;
  } catch (const UserError&) {
    return false;
  }
}

void draw_shard_groups(Draw& draw, RandomLayout& result) {
  ShardSettings& shard = result.settings.shard;
  if (shard.scope == ShardScope::kFull) {
    if (draw.chance(2)) shard.group = draw.divisor(result.settings.parallel.layout.dp);
    return;
  }
  if (draw.chance(2)) shard.reduce_group = draw.divisor(result.num_ranks);
  if (!fits(result.settings, result.num_ranks)) shard.reduce_group = 1;
}

/// Whether the program itself accepts the case.
bool is_valid(const RandomLayout& layout) {
  try {
    validate(layout.settings.model);
    for (int64_t rank = 0; rank < layout.num_ranks; ++rank) {
      const auto world = make_planned_world(rank, layout.num_ranks);
      const Settings& settings = layout.settings;
      const BatchShape shape{
          .num_tokens = settings.train.micro_batch * settings.data.sequence_length,
          .max_sequences = settings.train.micro_batch,
          .sequence_length = settings.data.sequence_length};
      const TrainingModel model(settings.model, shape, settings.train.saved_policy(),
                                make_cpu_kernels(), make_run_layout(settings, *world).part);
    }
    return true;
  } catch (const UserError&) {
    return false;
  }
}

/// Whether matrices may have gradients of roundings alone, which Muon brings to the size of any
/// other: those of the router, where a token's one expert has all of its weight and the loads are
/// even, and of queries, where the labels that are there are of tokens that see themselves alone.
bool may_lack_gradients(const Settings& settings) {
  const MoeConfig& moe = settings.model.moe;
  const bool constant =
      moe.top_k == 1 && (moe.score_order == ScoreOrder::kAfterTopK || moe.normalize_top_k);
  return constant || settings.data.sequence_length <= settings.model.mtp_layers + 1;
}

/// Documents of several lengths for ranks that share them as they need.
void make_contexts_dynamic(Draw& draw, RandomLayout& result) {
  Settings& settings = result.settings;
  ParallelSpec& parallel = settings.parallel;
  result.num_ranks /= parallel.layout.pp;
  parallel.layout.pp = 1;
  parallel.layout.dense_order = "tp-cp-dp-pp";
  parallel.layout.expert_order = "etp-ep-edp-pp";
  parallel.schedule = PipelineKind::kOneFOneB;
  parallel.chunks_per_stage = 1;
  parallel.pipeline_layout.clear();
  parallel.split_weights = false;
  parallel.attention = AttentionParallel::kTensor;
  parallel.context = ContextExchange::kRing;
  parallel.context_inner = 1;
  parallel.dynamic_cp = true;
  settings.data.split_documents = true;
  settings.data.sequence_length = 2 * parallel.layout.cp * parallel.layout.tp * (4 + draw.upto(8));
  settings.train.offload.clear();
  settings.qk_clip = 0;
  MoeConfig& moe = settings.model.moe;
  moe.balance_scope = BalanceTokens::kSequence;
  moe.capacity_factor = 0;
  moe.routing = Routing::kTopK;
  moe.top_p = 1;
  moe.router_jitter = 0;
  moe.jitter_experts = false;
  moe.draw_experts = false;
}

bool allows_contexts(const RandomLayout& layout) {
  try {
    validate_contexts(layout.settings);
    return true;
  } catch (const UserError&) {
    return false;
  }
}

}  // namespace

RandomLayout draw_context_layout(uint64_t seed, int64_t max_ranks) {
  for (uint64_t attempt = 0;; ++attempt) {
    Draw draw(mix(seed, attempt));
    RandomLayout result = draw_layout(mix(seed, attempt), max_ranks);
    make_contexts_dynamic(draw, result);
    if (allows_contexts(result) && is_valid(result)) return result;
    ensure(attempt < 200, "seed {} draws no valid layout", seed);
  }
}

RandomLayout draw_layout(uint64_t seed, int64_t max_ranks) {
  for (uint64_t attempt = 0;; ++attempt) {
    Draw draw(mix(seed, attempt));
    RandomLayout result;
    draw_degrees(draw, max_ranks, result);
    draw_pipeline(draw, result);
    draw_attention(draw, result);
    draw_experts(draw, result);
    draw_training(draw, result);
    draw_prediction(draw, result);
    if (may_lack_gradients(result.settings)) result.settings.optimizer_kind = OptimizerKind::kAdamW;
    draw_shard_groups(draw, result);
    result.settings.parallel.exchange =
        draw.of({ExchangeSizes::kExact, ExchangeSizes::kDirect, ExchangeSizes::kBounded});
    if (draw.chance(3)) draw_offload(draw, result);
    ShardSettings& shard = result.settings.shard;
    shard.state_on_host = shard.scope != ShardScope::kFull && draw.chance(4);
    draw_biases(draw, result);
    draw_multipliers(draw, result.settings.model);
    draw_delta(draw, result);
    draw_clones(draw, result);
    draw_mamba(draw, result);
    draw_noise(draw, result.settings);
    draw_choice(draw, result.settings);
    draw_mixed(draw, result);
    draw_chunks(draw, result);
    draw_expert_norms(draw, result);
    draw_normed_prediction(draw, result.settings);
    draw_compressed_attention(draw, result);
    draw_hash_layers(draw, result);
    draw_streams(draw, result);
    draw_state_norms(draw, result);
    draw_sparse_mixer(draw, result);
    draw_limit(draw, result.settings.model);
    drop_idle_biases(result.settings.model);
    result.settings = without_data(std::move(result.settings));
    if (is_valid(result)) return result;
    ensure(attempt < 200, "seed {} draws no valid layout", seed);
  }
}

void merge_passes(Settings& settings) {
  settings.train.schedule = "merged";
  settings.train.offload.clear();
  settings.parallel.split_weights = false;
  if (settings.parallel.schedule == PipelineKind::kGpipe)
    settings.parallel.schedule = PipelineKind::kOneFOneB;
  if (settings.shard.scope == ShardScope::kFull) settings.shard = {};
}

void prepare_run(RandomLayout& layout, int64_t steps, const std::string& folder) {
  Settings& settings = layout.settings;
  settings.train.steps = settings.schedule.num_steps = steps;
  settings.run.device = DeviceChoice::kCpu;
  settings.run.resume = ResumeMode::kNever;
  settings.run.folder = folder + "/run";
  settings.data.tokens = folder + "/tokens";
  std::filesystem::create_directories(folder);
  write_tokens(settings);
}

RandomLayout draw_compressed_layout(uint64_t seed, int64_t max_ranks) {
  RandomLayout layout = draw_layout(seed, max_ranks);
  layout.settings.shard.compression = GradientCompression::kBf16;
  return layout;
}

bool sends_compressed(const RandomLayout& layout) {
  const Settings& settings = layout.settings;
  const Layout degrees(settings.parallel.layout, layout.num_ranks);
  const bool full = settings.shard.scope == ShardScope::kFull;
  for (int64_t rank = 0; rank < layout.num_ranks; ++rank) {
    for (const ReplicaRanks& group : list_replica_ranks(settings, degrees, rank)) {
      const int64_t outer = std::ssize(group.ranks) / group.inner;
      if ((full ? group.inner : outer) > 1) return true;
    }
  }
  return false;
}

std::string describe(const RandomLayout& layout) {
  Settings settings = layout.settings;
  const Settings defaults;
  ConfigSchema schema = make_schema(settings);
  Settings plain;
  const auto base = make_schema(plain).resolved();
  const auto drawn = schema.resolved();
  std::string text = fmt::format("{} ranks", layout.num_ranks);
  for (size_t i = 0; i < drawn.size(); ++i) {
    if (drawn[i].value != base[i].value)
      text += fmt::format(" --{}={}", drawn[i].key, drawn[i].value);
  }
  return text;
}

}  // namespace tessera::testing
