#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "core/process/progress.h"
#include "core/saturating.h"
#include "model/config/config.h"
#include "model/config/limits.h"

namespace tessera {
namespace {

/// Those of them that choose what is seen.
Saturating count_index(const ModelConfig& config) {
  const IndexConfig& index = config.index;
  if (!index.is_on()) return 0;
  const Saturating queries = Saturating(config.latent.query_rank) * index.num_heads;
  return queries * index.head_size +
         Saturating(config.hidden_size) * (index.head_size + index.num_heads) + 2 * index.head_size;
}

/// The same of a layer whose indexer chooses among compressed tokens.
Saturating count_entry_index(const ModelConfig& config) {
  const IndexConfig& index = config.index;
  const Saturating queries = Saturating(config.compressed.query_rank) * index.num_heads;
  const Saturating compressor =
      (2 * Saturating(config.hidden_size) + config.compressed.sparse_rate) * 2 * index.head_size;
  return queries * index.head_size + Saturating(config.hidden_size) * index.num_heads + compressor +
         index.head_size;
}

/// What compresses tokens, and chooses among those.
Saturating count_compression(const ModelConfig& config, Compression compression) {
  if (compression == Compression::kNone) return 0;
  const bool sparse = compression == Compression::kSparse;
  const Saturating width = Saturating(sparse ? 2 : 1) * config.head_dim();
  return (2 * Saturating(config.hidden_size) + config.compressed.rate(compression)) * width +
         config.head_dim() + (sparse ? count_entry_index(config) : Saturating(0));
}

/// Weights of one layer's compressed attention.
Saturating count_compressed(const ModelConfig& config, Compression compression) {
  const Saturating h = config.hidden_size;
  const CompressedConfig& own = config.compressed;
  const Saturating heads = Saturating(config.num_heads) * config.head_dim();
  const Saturating outputs = Saturating(own.output_groups) * own.output_rank;
  return own.query_rank * (h + 1 + heads) + (h + 1) * config.head_dim() + heads * own.output_rank +
         outputs * h + (config.attention_sinks ? Saturating(config.num_heads) : Saturating(0)) +
         count_compression(config, compression);
}

/// Weights of one layer's attention.
Saturating count_attention(const ModelConfig& config) {
  const Saturating h = config.hidden_size;
  const Saturating n = config.num_heads;
  const LatentConfig& latent = config.latent;
  const Saturating queries = n * config.head_dim();
  const Saturating gate =
      config.attention_gate ? (h + (config.qkv_bias ? 1 : 0)) * config.gate_width() : Saturating(0);
  Saturating count = n * config.value_dim() * h + (config.output_bias ? h : Saturating(0));
  count += gate;
  if (config.attention_sinks) count += n;
  if (!config.is_latent()) {
    const Saturating keys = Saturating(config.kv_heads()) * config.head_dim();
    const Saturating values =
        config.keys_as_values ? Saturating(0) : Saturating(config.kv_heads()) * config.value_dim();
    const Saturating rows = queries + keys + values;
    count += h * rows + (config.qkv_bias ? rows : Saturating(0));
    if (config.qk_norm == QkNorm::kHead) count += 2 * config.head_dim();
    if (config.qk_norm == QkNorm::kAll) count += queries + keys;
    return count;
  }
  const Saturating into = h + (config.qkv_bias ? 1 : 0);
  count += latent.query_rank > 0 ? latent.query_rank * (into + 1 + queries) : h * queries;
  count += (latent.kv_rank + latent.rope_size) * into + latent.kv_rank + count_index(config);
  return count + latent.kv_rank * n * (latent.nope_size + latent.value_size);
}

/// The same of a layer with a gated delta rule.
Saturating count_delta(const ModelConfig& config) {
  const Saturating h = config.hidden_size;
  const DeltaConfig& delta = config.delta;
  const Saturating keys = delta.keys();
  const Saturating values = delta.values();
  const Saturating heads = delta.num_value_heads;
  // Queries, keys, values and strength; back.
  const Saturating projections = h * (2 * keys + values + heads) + values * h;
  // Decays and output gate, and what decays have beside a projection.
  const Saturating gates =
      delta.is_kimi() ? (h + keys) * delta.key_size + (h + values) * delta.value_size + keys + heads
                      : h * (heads + values) + 2 * heads;
  return projections + gates + delta.conv_size * (2 * keys + values) + delta.value_size;
}

/// The same of a layer with Mamba-2.
Saturating count_mamba(const ModelConfig& config) {
  const Saturating h = config.hidden_size;
  const MambaConfig& mamba = config.mamba;
  const Saturating inner = mamba.inner();
  const Saturating convolved = inner + 2 * Saturating(mamba.states());
  // Output gate, x, B, C and steps.
  const Saturating rows = inner + convolved + mamba.num_heads;
  const Saturating biases =
      (mamba.conv_bias ? convolved : Saturating(0)) + (mamba.proj_bias ? rows + h : Saturating(0));
  return rows * h + mamba.conv_size * convolved + 3 * Saturating(mamba.num_heads) + inner +
         inner * h + biases;
}

/// The same of a layer with a gated short convolution.
Saturating count_conv(const ModelConfig& config) {
  const Saturating h = config.hidden_size;
  return 4 * h * h + h * config.conv.size + (config.conv.bias ? 5 * h : Saturating(0));
}

Saturating count_mixer(const ModelConfig& config, LayerKind kind) {
  if (kind.delta) return count_delta(config);
  if (kind.mamba) return count_mamba(config);
  if (kind.conv) return count_conv(config);
  const ModelConfig own = config.of_layer(kind);
  return own.is_compressed() ? count_compressed(own, kind.compression) : count_attention(own);
}

/// Inner sizes of all experts of a layer together.
Saturating count_expert_rows(const MoeConfig& moe) {
  if (moe.inner_sizes.empty()) return Saturating(moe.num_experts) * moe.inner_size;
  return std::accumulate(moe.inner_sizes.begin(), moe.inner_sizes.end(), Saturating(0));
}

/// Weights of an MLP of that inner size, its biases included where it may have them.
Saturating count_mlp(const ModelConfig& config, int64_t inner_size) {
  const Saturating first = Saturating(config.is_gated() ? 2 : 1) * inner_size;
  return (first + inner_size) * config.hidden_size +
         (config.mlp_bias ? first + config.hidden_size : Saturating(0));
}

/// Weights of a norm of hidden states.
Saturating count_norm(const ModelConfig& config) {
  return (config.norm == NormKind::kLayer ? 2 : 1) * Saturating(config.hidden_size);
}

/// Weights of a layer's router and of the norms around its experts.
Saturating count_router(const ModelConfig& config) {
  const MoeConfig& moe = config.moe;
  const Saturating h = config.hidden_size;
  const int64_t for_each_output = (moe.router_bias ? 1 : 0) + (moe.expert_scale ? 1 : 0);
  return moe.router_outputs() * (h + for_each_output) + (moe.router_norm ? h : Saturating(0)) +
         (moe.separate_norms ? 3 * count_norm(config) : Saturating(0));
}

/// Weights of what residual streams are weighed by, so many logits a stream: by a part of a layer
/// before and behind it, or by the head alone.
Saturating count_streams(const ModelConfig& config, int64_t for_each) {
  if (!config.has_streams()) return 0;
  const Saturating logits = Saturating(for_each) * config.residual_streams;
  return logits * (Saturating(config.state_width()) + 1) + (for_each == 1 ? 1 : 3);
}

/// Numbers and weights of all layers that nothing trains.
int64_t count_fixed(const ModelConfig& config) {
  Saturating count = config.layer_scalars ? config.all_layers() : 0;
  for (int64_t layer = 0; layer < config.all_layers(); ++layer) {
    if (config.is_hash_layer(layer)) count += Saturating(config.vocab_size) * config.moe.top_k;
    if (!config.is_attention_layer(layer)) continue;
    if (!config.is_compressed()) count += count_index(config);
    if (config.compression(layer) == Compression::kSparse) count += count_entry_index(config);
  }
  return count.value();
}

}  // namespace

ParameterCount count_parameters(const ModelConfig& config) {
  const Saturating h = config.hidden_size;
  const int64_t width = config.is_gated() ? 3 : 2;
  const Saturating tables = Saturating(config.tie_embeddings ? 1 : 2) * config.vocab_size * h +
                            (config.head_bias ? config.vocab_size : 0);
  const Saturating dense = count_mlp(config, config.dense_inner_size());
  const Saturating expert_rows = count_expert_rows(config.moe);
  const Saturating expert_biases =
      config.moe.mlp_bias
          ? (width - 1) * expert_rows + Saturating(config.moe.num_experts) * config.expert_width()
          : Saturating(0);
  const Saturating all_experts = expert_rows * width * config.expert_width() + expert_biases;
  const Saturating active_experts =
      all_experts * config.moe.top_k / std::max<int64_t>(config.moe.router_outputs(), 1);
  const Saturating projections = 2 * h * config.moe.latent_size;
  const Saturating shared =
      config.moe.shared_inner_size == 0
          ? Saturating(0)
          : count_mlp(config, config.moe.shared_inner_size) + (config.moe.shared_gate ? h : 0);
  const Saturating router = count_router(config);

  const Saturating norm = count_norm(config);
  const Saturating norms = (config.post_norms ? 2 : 1) * norm;  // of a part of a layer

  const Saturating of_streams = count_streams(config, config.residual_streams + 2);
  Saturating total = tables + norm + count_streams(config, 1);
  Saturating active = total;
  for (int64_t layer = 0; layer < config.all_layers(); ++layer) {
    const bool moe = config.is_moe_layer(layer);
    // Two norms before the projections of state and embedding, and one before the head.
    const Saturating joining = config.is_mtp_layer(layer)
                                   ? 2 * h * h + 3 * norm + count_streams(config, 1)
                                   : Saturating(0);
    Saturating for_all_tokens = joining + (config.layer_scalars ? 1 : 0);
    if (config.has_mixer(layer))
      for_all_tokens += of_streams + norms + count_mixer(config, config.layer_kind(layer));
    const Saturating table =
        config.is_hash_layer(layer) ? Saturating(config.vocab_size) * config.moe.top_k : 0;
    if (config.has_mlp(layer))
      for_all_tokens += of_streams + norms + (moe ? projections + shared + router : dense);
    total += for_all_tokens + table + (moe ? all_experts : Saturating(0));
    active += for_all_tokens + table + (moe ? active_experts : Saturating(0));
  }
  const AdapterCount adapters = count_adapters(config);
  total += adapters.total;
  active += adapters.active;
  return {total.value(), active.value(),
          config.lora.is_on() ? adapters.total : total.value() - count_fixed(config)};
}

void check_parameter_count(const ModelConfig& config) {
  const int64_t total = count_parameters(config).total;
  if (total <= kMaxParameters) return;
  const MoeConfig& moe = config.moe;
  const std::string experts =
      moe.num_experts == 0
          ? ""
          : fmt::format(", {} experts of inner size {}", moe.num_experts,
                        moe.inner_sizes.empty() ? moe.inner_size
                                                : *std::ranges::max_element(moe.inner_sizes));
  user_error(
      "a model of {} parameters or more cannot exist; at most {} are supported: it has {}, hidden "
      "size {}, dense inner size {}, {} of {} elements, a vocabulary of {}{}",
      format_count(static_cast<double>(total)), format_count(static_cast<double>(kMaxParameters)),
      format_things(config.all_layers(), "layer"), config.hidden_size, config.dense_inner_size(),
      format_things(config.num_heads, "head"), config.head_dim(), config.vocab_size, experts);
}

}  // namespace tessera
