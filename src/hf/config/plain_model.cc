#include "hf/config/plain_model.h"

#include <algorithm>
#include <cmath>

#include "model/config/rotary.h"

namespace tessera {
namespace {

RopeConfig plain_rope(const RopeConfig& rope) {
  if (rope.fraction == 0) return {.fraction = 0};
  RopeConfig plain;
  plain.base = rope.base;
  plain.fraction = rope.fraction;
  plain.proportional = rope.proportional && rope.fraction < 1;
  plain.interleaved = rope.interleaved;
  plain.scaling = rope.scaling;
  if (rope.scaling == RopeScaling::kNone) return plain;
  plain.factor = rope.factor;
  if (rope.scaling == RopeScaling::kDynamic) plain.max_length = rope.max_length;
  if (rope.scaling == RopeScaling::kLongRope) {
    plain.factor = 1;  // amplitudes alone follow from it
    plain.original_length = rope.original_length;
    plain.short_factors = rope.short_factors;
    plain.long_factors = rope.long_factors;
    plain.short_mscale = rotary_amplitude(rope, rope.original_length);
    plain.long_mscale = rotary_amplitude(rope, rope.original_length + 1);
  }
  if (rope.scaling == RopeScaling::kLlama3) {
    plain.original_length = rope.original_length;
    plain.low_frequency_factor = rope.low_frequency_factor;
    plain.high_frequency_factor = rope.high_frequency_factor;
  }
  if (rope.scaling != RopeScaling::kYarn) return plain;
  plain = rope;
  plain.proportional = false;
  plain.max_length = 0;
  plain.low_frequency_factor = RopeConfig{}.low_frequency_factor;
  plain.high_frequency_factor = RopeConfig{}.high_frequency_factor;
  plain.short_factors.clear();
  plain.long_factors.clear();
  plain.short_mscale = plain.long_mscale = 0;
  return plain;
}

MoeConfig plain_moe(const ModelConfig& model) {
  MoeConfig plain;
  plain.num_experts = 0;
  if (model.num_moe_layers() == 0) return plain;
  const MoeConfig& moe = model.moe;
  plain.num_experts = moe.num_experts;
  plain.top_k = moe.top_k;
  const auto sizes = moe.expert_sizes();
  const bool equal = std::ranges::all_of(sizes, [&](int64_t size) { return size == sizes[0]; });
  plain.inner_size = sizes[0];
  if (!equal) plain.inner_sizes = sizes;
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    if (!model.is_moe_layer(layer)) plain.dense_layers.push_back(layer);
  }
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    if (model.is_hash_layer(layer)) plain.hash_layers.push_back(layer);
  }
  plain.score = moe.score;
  plain.normalize_top_k = moe.normalize_top_k || moe.score_order == ScoreOrder::kAfterTopK;
  plain.score_scale = moe.score_scale;
  plain.probs_on_input = moe.probs_on_input;
  plain.router_bias = moe.router_bias;
  plain.sparse_mixer = moe.sparse_mixer;
  plain.router_norm = moe.router_norm;
  plain.expert_scale = moe.expert_scale;
  plain.mlp_bias = moe.mlp_bias;
  if (moe.top_groups < moe.num_groups) {
    plain.num_groups = moe.num_groups;
    plain.top_groups = moe.top_groups;
    plain.group_score = moe.group_score;
  }
  plain.force_balanced = moe.force_balanced;
  if (moe.experts_choose()) plain.routing = moe.routing;
  plain.top_p = moe.top_p;
  plain.zero_experts = moe.zero_experts;
  plain.expert_bias = moe.has_expert_bias();
  plain.shared_inner_size = moe.shared_inner_size;
  plain.shared_gate = moe.shared_gate;
  plain.separate_norms = moe.separate_norms;
  plain.latent_size = moe.latent_size;
  return plain;
}

/// Says of layers with a window alone what no layer without one has otherwise.
void plain_windows(ModelConfig& plain) {
  bool with_window = false;
  bool without = false;
  for (int64_t layer = 0; layer < plain.num_layers; ++layer) {
    const LayerKind kind = plain.layer_kind(layer);
    if (kind.attends()) (kind.window ? with_window : without) = true;
  }
  const ModelConfig windows = plain.of_layer({.window = with_window});
  if (!without) {
    plain.rope = windows.rope;
    plain.num_heads = windows.num_heads;
    plain.num_kv_heads = windows.num_kv_heads;
    plain.head_size = windows.head_size;
    plain.attention_sinks = windows.attention_sinks;
  }
  plain.own_window_rope = windows.rope != plain.rope;
  plain.window_rope = plain.own_window_rope ? windows.rope : RopeConfig{};
  plain.window_heads = windows.num_heads != plain.num_heads ? windows.num_heads : int64_t{0};
  plain.window_kv_heads =
      windows.num_kv_heads != plain.num_kv_heads ? windows.num_kv_heads : int64_t{0};
  plain.window_head_size = windows.head_size != plain.head_size ? windows.head_size : int64_t{0};
  plain.window_sinks = windows.attention_sinks && !plain.attention_sinks;
}

/// Says nothing of norms and temperatures that no layer has.
void plain_queries(ModelConfig& plain) {
  if (!plain.has_temperatures()) {
    plain.temperature_scale = ModelConfig{}.temperature_scale;
    plain.temperature_length = ModelConfig{}.temperature_length;
  }
  bool normed = false;
  for (int64_t layer = 0; layer < plain.num_layers; ++layer) {
    const LayerKind kind = plain.layer_kind(layer);
    normed |= kind.attends() && plain.of_layer(kind).qk_norm != QkNorm::kNone;
  }
  if (plain.qk_norm == QkNorm::kL2 && !normed) {
    plain.qk_norm = QkNorm::kNone;
    plain.norm_after_rotation = false;
  }
}

}  // namespace

double swiglu_limit(const ModelConfig& model) {
  return model.swiglu_limit > 0 ? model.swiglu_limit : published_limit(model.activation);
}

double plain_scale(const ModelConfig& model) {
  return 1.0 / std::sqrt(static_cast<double>(model.head_dim()));
}

ModelConfig plain_model(const ModelConfig& model) {
  ModelConfig plain = model;
  plain.num_kv_heads = model.kv_heads();
  plain.head_size = model.is_latent() ? 0 : model.head_dim();
  if (!model.is_compressed()) {
    plain.compressed = {};
    plain.compressed_rope = {};
  }
  std::ranges::sort(plain.compressed.sparse_layers);
  std::ranges::sort(plain.compressed.heavy_layers);
  if (model.value_dim() == model.head_dim()) plain.value_size = 0;
  if (!model.attention_gate) plain.gate_function = AttentionGate::kSigmoid;
  plain.inner_size = model.has_dense_layers() ? model.dense_inner_size() : 0;
  plain.window_layers.clear();
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    if (model.has_window(layer)) plain.window_layers.push_back(layer);
  }
  if (model.attention_multiplier == plain_scale(model)) plain.attention_multiplier = 0;
  plain.swiglu_limit = swiglu_limit(model);
  plain.init_deviation = ModelConfig{}.init_deviation;
  plain.mtp_loss_coefficient = ModelConfig{}.mtp_loss_coefficient;
  plain.rope = plain_rope(model.rope);
  plain.window_rope = plain_rope(model.window_rope);
  if (plain.window_layers.empty()) plain.window_kind = WindowKind::kSliding;
  plain_windows(plain);
  plain_queries(plain);
  if (!model.is_latent()) plain.latent = {};
  if (!model.index.is_on()) plain.index = {};
  if (!model.has_streams()) {
    plain.residual_sinkhorn_iterations = ModelConfig{}.residual_sinkhorn_iterations;
    plain.residual_eps = ModelConfig{}.residual_eps;
  }
  plain.delta_layers.clear();
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    if (model.is_delta_layer(layer)) plain.delta_layers.push_back(layer);
  }
  if (plain.delta_layers.empty()) plain.delta = {};
  for (auto* layers : {&plain.mamba_layers, &plain.conv_layers, &plain.layers_without_mixer,
                       &plain.layers_without_mlp})
    std::ranges::sort(*layers);
  if (plain.mamba_layers.empty()) plain.mamba = {};
  if (plain.conv_layers.empty()) plain.conv = {};
  plain.moe = plain_moe(model);
  return plain;
}

}  // namespace tessera
