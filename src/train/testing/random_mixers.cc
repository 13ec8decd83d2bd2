#include "train/testing/random_mixers.h"

#include <algorithm>

namespace tessera::testing {

namespace {

/// A norm of what a layer or a head gives makes rounding errors of small rows as large as the rows:
/// with an epsilon of its usual size a few steps of so small a model tell layouts apart.
constexpr double kEpsilonBehind = 0.05;

/// Layers that hand a state from token to token go with context parallelism, not with attention's
/// exchange of heads over the ranks of tensor parallelism.
bool allows_states(const ParallelSpec& parallel) {
  return parallel.attention != AttentionParallel::kUlysses;
}

/// Heads that every rank of tp and cp has equally many of.
int64_t draw_heads(Draw& draw, const LayoutSpec& layout) {
  return layout.tp * layout.cp * (1 + draw.upto(2));
}

/// Keys, or groups, of `heads`: perhaps fewer than ranks of cp, of which several have each then.
int64_t draw_shared_heads(Draw& draw, const LayoutSpec& layout, int64_t heads) {
  return draw.chance(2) ? heads : layout.tp * draw.divisor(layout.cp);
}

}  // namespace

void draw_delta(Draw& draw, RandomLayout& result) {
  ModelConfig& model = result.settings.model;
  const ParallelSpec& parallel = result.settings.parallel;
  model.attention_gate = !model.is_latent() && draw.chance(4);
  if (model.is_latent() && !model.index.is_on() && draw.chance(4)) model.rope = {.fraction = 0};
  if (!allows_states(parallel) || model.window > 0 || !draw.chance(3)) return;
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    if (draw.chance(2)) model.delta_layers.push_back(layer);
  }
  const int64_t heads = draw_heads(draw, parallel.layout);
  const bool is_kimi = draw.chance(2);
  model.delta = {.kind = is_kimi ? DeltaKind::kKimi : DeltaKind::kGated,
                 .num_key_heads = is_kimi ? heads : draw_shared_heads(draw, parallel.layout, heads),
                 .num_value_heads = heads * (is_kimi ? 1 : 1 + draw.upto(2)),
                 .key_size = 12 + draw.upto(4),  // shorter ones, made unit vectors, turn far
                 .value_size = 3 + draw.upto(4),
                 .conv_size = 1 + draw.upto(4)};
  if (!model.delta_layers.empty()) model.norm_eps = kEpsilonBehind;
}

void draw_mamba(Draw& draw, RandomLayout& result) {
  ModelConfig& model = result.settings.model;
  const ParallelSpec& parallel = result.settings.parallel;
  if (!allows_states(parallel) || model.window > 0 || result.settings.qk_clip > 0 ||
      !draw.chance(3))
    return;
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    if (!model.is_delta_layer(layer) && draw.chance(2)) model.mamba_layers.push_back(layer);
    const bool is_last = layer == model.num_layers - 1 && model.mtp_layers > 0;
    if (is_last || !draw.chance(4)) continue;
    const bool has_state = model.is_delta_layer(layer) || model.is_mamba_layer(layer);
    (has_state ? model.layers_without_mlp : model.layers_without_mixer).push_back(layer);
  }
  const int64_t heads = draw_heads(draw, parallel.layout);
  model.mamba = {.num_heads = heads,
                 .head_size = 3 + draw.upto(4),
                 .num_groups = draw_shared_heads(draw, parallel.layout, heads),
                 .state_size = 3 + draw.upto(4),
                 .conv_size = 1 + draw.upto(4),
                 .conv_bias = draw.chance(2),
                 .proj_bias = draw.chance(2)};
}

void draw_mixed(Draw& draw, RandomLayout& result) {
  ModelConfig& model = result.settings.model;
  const ParallelSpec& parallel = result.settings.parallel;
  model.gate_function =
      draw.of({AttentionGate::kSigmoid, AttentionGate::kSoftplus, AttentionGate::kSoftplusOfHeads});
  if (!model.is_latent() && draw.chance(4)) {
    model.value_size = 3 + draw.upto(6);
    model.value_multiplier = draw.of({1.0, 0.7});
  }
  model.post_norms = draw.chance(4);
  if (model.post_norms) model.norm_eps = kEpsilonBehind;
  model.logit_softcap = draw.of({0.0, 0.0, 4.0});
  if (!model.is_latent()) model.value_norm = draw.chance(4);
  if (model.window > 0) {
    if (!model.is_latent() && result.settings.qk_clip == 0 && draw.chance(2)) {
      model.window_head_size = draw.of<int64_t>({0, 4, 6});
      model.window_heads = model.num_heads * draw.of<int64_t>({1, 2});
      model.window_kv_heads = draw.divisor(model.window_heads);
      model.window_sinks = draw.chance(2);
    }
    model.own_window_rope = draw.chance(2);
    if (!model.own_window_rope) return;
    model.window_rope = {.base = 100, .interleaved = draw.chance(2)};
    if (!model.is_latent() && draw.chance(2)) model.rope = {.fraction = 0};
    return;
  }
  if (!allows_states(parallel) || result.settings.qk_clip > 0 || !draw.chance(3)) return;
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    if (model.is_attention_layer(layer) && draw.chance(2)) model.conv_layers.push_back(layer);
  }
  model.conv = {.size = 1 + draw.upto(4), .bias = draw.chance(2)};
  const int64_t ranks = parallel.layout.tp * parallel.layout.cp;
  if (!model.conv_layers.empty())
    model.hidden_size = (model.hidden_size + ranks - 1) / ranks * ranks;
}

void draw_chunks(Draw& draw, RandomLayout& result) {
  ModelConfig& model = result.settings.model;
  if (model.is_latent()) return;
  if (model.window > 0 && draw.chance(2)) model.window_kind = WindowKind::kChunked;
  const bool clips = result.settings.qk_clip > 0;
  if (model.qk_norm == QkNorm::kNone && !clips && draw.chance(3)) model.qk_norm = QkNorm::kL2;
  if (!draw.chance(2)) return;
  model.temperature_scale = 0.1;
  model.temperature_length = 1 + draw.upto(5);
  if (!model.has_temperatures()) model.temperature_scale = 0;
}

namespace {

/// Without what compressed attention does not go with.
void clear_attention(ModelConfig& model) {
  const ModelConfig plain;
  model.attention = AttentionKind::kCompressed;
  model.num_kv_heads = 0;
  model.qk_norm = QkNorm::kNone;
  model.norm_after_rotation = model.qkv_bias = model.output_bias = false;
  model.attention_gate = model.value_norm = model.keys_as_values = model.window_sinks = false;
  model.own_window_rope = false;
  model.value_size = model.window_heads = model.window_kv_heads = model.window_head_size = 0;
  model.value_multiplier = 1;
  model.temperature_scale = 0;
  model.window_layers.clear();
  model.window_kind = WindowKind::kSliding;
  model.rope = {.interleaved = model.rope.interleaved};
  model.window_rope = plain.window_rope;
}

}  // namespace

void draw_compressed_attention(Draw& draw, RandomLayout& result) {
  ModelConfig& model = result.settings.model;
  const ParallelSpec& parallel = result.settings.parallel;
  if (model.is_latent() || result.settings.qk_clip > 0 || !draw.chance(6)) return;
  clear_attention(model);
  const int64_t tp = parallel.layout.tp;
  model.compressed = {.query_rank = 8 + draw.upto(4),
                      .rope_size = draw.of<int64_t>({2, 4}),
                      .output_groups = tp * draw.divisor(model.num_heads / tp),
                      .output_rank = 3 + draw.upto(4),
                      .sparse_rate = 1 + draw.upto(3),
                      .heavy_rate = 2 + draw.upto(4)};
  const bool spreads_tokens =
      parallel.layout.cp > 1 || parallel.attention == AttentionParallel::kUlysses;
  if (spreads_tokens) return;
  if (model.window == 0) model.window = 2 + draw.upto(5);
  const bool indexes = result.settings.shard.scope != ShardScope::kFull;
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    if (!model.is_attention_layer(layer) || draw.chance(3)) continue;
    const bool sparse = indexes && draw.chance(2);
    (sparse ? model.compressed.sparse_layers : model.compressed.heavy_layers).push_back(layer);
  }
  constexpr int64_t kAll = 1000;
  if (!model.compressed.sparse_layers.empty())
    model.index = {.top_k = kAll, .num_heads = 2, .head_size = 6};
  if (!model.compressed.has_entries()) return;
  model.compressed_rope = {.base = 100};
  // Few entries give gradients of low rank, whose rounding errors Muon would make as large.
  result.settings.optimizer_kind = OptimizerKind::kAdamW;
}

void draw_noise(Draw& draw, Settings& settings) {
  MoeConfig& moe = settings.model.moe;
  const bool is_named = std::ranges::any_of(
      settings.train.offload, [](const std::string& name) { return name.starts_with("mlp_norm"); });
  if (moe.num_experts == 0 || is_named || !draw.chance(4)) return;
  moe.router_jitter = draw.of({0.01, 0.3});
  moe.jitter_experts = draw.chance(2);
}

void draw_expert_norms(Draw& draw, RandomLayout& result) {
  MoeConfig& moe = result.settings.model.moe;
  if (moe.num_experts == 0) return;
  moe.probs_on_input = moe.experts == ExpertPath::kGrouped && draw.chance(4);
  if (moe.jitter_experts) return;
  moe.router_norm = draw.chance(4);
  moe.expert_scale = draw.chance(4);
  moe.separate_norms = moe.shared_inner_size > 0 && draw.chance(3);
  if (moe.separate_norms) result.settings.model.norm_eps = kEpsilonBehind;
}

void draw_streams(Draw& draw, RandomLayout& result) {
  ModelConfig& model = result.settings.model;
  if (model.mtp_normed || !draw.chance(4)) return;
  model.residual_streams = 2 + draw.upto(3);
  model.residual_sinkhorn_iterations = 1 + draw.upto(8);
}

void drop_idle_biases(ModelConfig& model) {
  if (model.rope.fraction == 0) model.qkv_bias = false;
}

void draw_limit(Draw& draw, ModelConfig& model) {
  if (is_clamped(model.activation)) model.swiglu_limit = draw.of({0.0, 0.5});
}

void draw_hash_layers(Draw& draw, RandomLayout& result) {
  ModelConfig& model = result.settings.model;
  const MoeConfig& moe = model.moe;
  const bool may = moe.num_groups == 1 && moe.zero_experts == 0 && moe.top_p == 1 &&
                   !moe.experts_choose() && !result.settings.parallel.dynamic_cp &&
                   result.settings.shard.scope != ShardScope::kFull;
  if (!may || !draw.chance(4)) return;
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    const bool is_of_prediction = model.mtp_layers > 0 && layer == model.num_layers - 1;
    if (model.is_moe_layer(layer) && !is_of_prediction && draw.chance(2))
      model.moe.hash_layers.push_back(layer);
  }
}

void draw_state_norms(Draw& draw, RandomLayout& result) {
  ModelConfig& model = result.settings.model;
  if (!model.mtp_normed && draw.chance(4)) model.norm = NormKind::kLayer;
  model.head_bias = model.mtp_layers == 0 && draw.chance(4);
}

void draw_sparse_mixer(Draw& draw, RandomLayout& result) {
  MoeConfig& moe = result.settings.model.moe;
  const bool may = moe.num_experts > 0 && moe.routing == Routing::kTopK && moe.num_groups == 1 &&
                   !moe.has_expert_bias() && moe.top_p == 1 && moe.hash_layers.empty();
  if (!may || !draw.chance(4)) return;
  moe.score = ScoreFunction::kSoftmax;
  moe.score_order = ScoreOrder::kBeforeTopK;
  moe.normalize_top_k = false;
  moe.score_scale = 1;
  moe.sparse_mixer = draw.of({0.05, 0.3});
  moe.draw_experts = draw.chance(2);
}

}  // namespace tessera::testing
