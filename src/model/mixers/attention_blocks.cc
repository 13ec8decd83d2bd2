#include "model/mixers/attention_blocks.h"

#include <algorithm>
#include <cmath>

#include "model/mixers/attention_inputs.h"
#include "model/mixers/compressed_blocks.h"
#include "model/mixers/entry_blocks.h"
#include "model/mixers/index_blocks.h"
#include "ops/attention/attention.h"
#include "ops/attention_sink/attention_sink.h"
#include "ops/cache_append/cache_append.h"
#include "ops/collective/collective.h"
#include "ops/collective/head_exchange.h"
#include "ops/max_logits/max_logits.h"
#include "ops/paged_attention/paged_attention.h"
#include "ops/repeat_heads/repeat_heads.h"
#include "ops/ring_attention/ring_attention.h"
#include "ops/sigmoid_gate/sigmoid_gate.h"
#include "ops/sparse_attention/sparse_attention.h"

namespace tessera {
namespace {

/// The window as the layer's attention sees it. Packed sequences are given cut into chunks.
void set_window(const LayerBuilder& builder, AttentionSpec& spec) {
  if (!builder.kind.window) return;
  const int64_t window = builder.config.window;
  if (!sees_chunks(builder.config, builder.kind)) {
    spec.window = window;
  } else if (builder.cache) {
    spec.chunk = window;
  } else {
    const int64_t length = builder.shape.sequence_length;
    spec.sequence_length = length > 0 ? std::min(length, window) : window;
  }
}

AttentionSpec heads_spec(const LayerBuilder& builder, const AttentionShare& share) {
  const ModelConfig& config = builder.config;
  if (caches_latents(builder)) {
    const double scale = config.attention_scale();
    const LatentConfig& latent = config.latent;
    return {.num_heads = config.num_heads,
            .num_kv_heads = 1,
            .head_size = latent.kv_rank + latent.rope_size,
            .head_size_v = latent.kv_rank,
            .scale = scale > 0 ? scale : 1 / std::sqrt(static_cast<double>(config.head_dim())),
            .sequence_length = builder.shape.sequence_length};
  }
  const int64_t parts = builder.groups.heads->size();
  return {.num_heads = share.num_heads / parts,
          .num_kv_heads = std::max<int64_t>(share.num_kv_heads / parts, 1),
          .head_size = config.head_dim(),
          .head_size_v = config.value_dim(),
          .scale = config.attention_scale(),
          .sequence_length = builder.shape.sequence_length};
}

AttentionSpec attention_spec(const LayerBuilder& builder, const AttentionShare& share) {
  AttentionSpec spec = heads_spec(builder, share);
  set_window(builder, spec);
  return spec;
}

/// The bounds of what tokens see at most: sequences, or their chunks.
ValueId bounds_of_packed(LayerBuilder& builder) {
  return builder.port(sees_chunks(builder.config, builder.kind) ? Port::kChunkBounds
                                                                : Port::kCuSeqlens);
}

/// Gives away tokens' heads and takes the other ranks' tokens: heads are spread over the group, and
/// where there are fewer than ranks, key-value heads are repeated first.
ValueId exchange_heads(LayerBuilder& builder, ValueId x, int64_t num_heads,
                       const std::string& name) {
  const CommunicatorPtr& group = builder.groups.heads;
  Program& program = builder.program();
  if (group->size() == 1) return x;
  if (num_heads < group->size()) {
    x = program.add1(make_repeat_heads(num_heads, group->size() / num_heads), {x},
                     name + "_repeated");
    num_heads = group->size();
  }
  return program.add1(make_gather_heads(group, num_heads), {x}, name + "_of_all_tokens");
}

/// The largest logits of the heads that this rank attends with. Queries of a ring need the keys of
/// all its ranks.
void measure_logits(LayerBuilder& builder, const AttentionSpec& spec, ValueId bounds, ValueId q,
                    ValueId k, ValueId lse) {
  Program& program = builder.program();
  const BatchShape& shape = builder.shape;
  const CommunicatorPtr& ring = builder.groups.ring;
  MaxLogitsSpec measured = {.attention = spec, .limit = shape.qk_clip};
  if (ring->size() > 1) {
    measured.tokens = {.num_rows = shape.num_tokens / shape.sequence_length,
                       .row_length = shape.sequence_length,
                       .ring = ring->size()};
    measured.rank = ring->rank();
    k = program.add1(make_all_gather(ring), {k}, "k_of_ring");
  }
  builder.layer.ports.set(Port::kMaxLogits,
                          program.add1(make_max_logits(measured), {q, k, lse, bounds},
                                       std::string(port_name(Port::kMaxLogits))));
}

/// Lets the sinks of the heads take their share of an attention's probabilities. `out` are o and
/// lse of `num_heads` heads, the one number `part` of as many equal parts of this rank's.
ValueId attend_sinks(LayerBuilder& builder, const AttentionShare& share,
                     const std::vector<ValueId>& out, int64_t num_heads, int64_t part) {
  const int64_t copies = share.by_heads ? 1 : builder.tp();
  const ValueId sinks = builder.f32_weight(
      "attn.sinks",
      {.slice = head_rows({builder.config.num_heads}, true, share, builder), .tp_copies = copies});
  return builder.program().add1(
      make_attention_sink(
          {.num_heads = num_heads, .num_sinks = share.num_heads, .first_head = part * num_heads}),
      {out[attention::kO], out[attention::kLse], sinks}, "attn_with_sinks");
}

/// Attends to what an indexer chose of keys and values: packed ones, or all that caches have.
ValueId attend_chosen(LayerBuilder& builder, const AttentionShare& share, const QueryKeyValue& x,
                      ValueId keys, ValueId values) {
  const auto attended = builder.program().add(make_sparse_attention(attention_spec(builder, share)),
                                              {x.q, keys, values, build_choice(builder, x.index)},
                                              {"attn_out", "attn_lse"});
  if (!builder.config.attention_sinks) return attended[attention::kO];
  return attend_sinks(builder, share, attended, share.num_heads, 0);
}

/// Attends to windows and to entries of compressed tokens, rows of which were chosen.
ValueId attend_entries(LayerBuilder& builder, const AttentionShare& share, const QueryKeyValue& x) {
  const auto attended =
      builder.program().add(make_sparse_attention(heads_spec(builder, share), entry_sight(builder)),
                            {x.q, x.k, x.v, x.chosen}, {"attn_out", "attn_lse"});
  if (!builder.config.attention_sinks) return attended[attention::kO];
  return attend_sinks(builder, share, attended, share.num_heads, 0);
}

/// Attention within a rank's packed sequences, or those that a ring shares.
OperatorPtr make_packed(const LayerBuilder& builder, const AttentionSpec& spec) {
  const CommunicatorPtr& ring = builder.groups.ring;
  const BatchShape& shape = builder.shape;
  if (ring->size() == 1) return make_attention(spec);
  if (builder.groups.policy.plans_contexts)
    return make_ring_attention_by_sequence(spec, shape.num_tokens, ring);
  return make_ring_attention(spec, shape.num_tokens / shape.sequence_length, shape.sequence_length,
                             ring);
}

/// Attends to the keys and values of the packed sequences of the whole micro-batch.
ValueId attend_packed(LayerBuilder& builder, const AttentionShare& share, const QueryKeyValue& x) {
  if (x.index.choose()) return attend_chosen(builder, share, x, x.k, x.v);
  Program& program = builder.program();
  const StageGroups& groups = builder.groups;
  const BatchShape& shape = builder.shape;
  const ValueId bounds = bounds_of_packed(builder);
  const AttentionSpec spec = attention_spec(builder, share);
  const ValueId q = exchange_heads(builder, x.q, share.num_heads, "q");
  const ValueId k = exchange_heads(builder, x.k, share.num_kv_heads, "k");
  const ValueId v = x.v == x.k ? k : exchange_heads(builder, x.v, share.num_kv_heads, "v");
  const auto attended =
      program.add(make_packed(builder, spec), {q, k, v, bounds}, {"attn_out", "attn_lse"});
  if (shape.qk_clip > 0) measure_logits(builder, spec, bounds, q, k, attended[attention::kLse]);
  const ValueId out =
      builder.config.attention_sinks
          ? attend_sinks(builder, share, attended, spec.num_heads, groups.heads->rank())
          : attended[attention::kO];
  if (groups.heads->size() == 1) return out;
  return program.add1(make_scatter_heads(groups.heads, share.num_heads), {out},
                      "attn_out_of_own_tokens");
}

/// The cache of values, which is that of keys where these are the values.
ValueId cached_values(LayerBuilder& builder, ValueId keys) {
  return builder.config.is_compressed() ? keys : builder.port(Port::kValueCache);
}

/// Appends keys and values to the caches and attends to them.
ValueId attend_cached(LayerBuilder& builder, const AttentionShare& share, const QueryKeyValue& x) {
  Program& program = builder.program();
  const int64_t capacity = builder.cache->capacity;
  const ValueId start = builder.port(Port::kStart);
  const ValueId length = builder.port(Port::kCacheLength);
  const ValueId keys = builder.port(Port::kKeyCache);
  const ValueId values = cached_values(builder, keys);
  program.add(make_cache_append(capacity), {x.k, start}, {}, {keys});
  if (values != keys) program.add(make_cache_append(capacity), {x.v, start}, {}, {values});
  if (x.index.choose()) return attend_chosen(builder, share, x, keys, values);
  const bool sinks = builder.config.attention_sinks;
  const auto op = make_attention_cached(attention_spec(builder, share), sinks);
  const std::vector<ValueId> inputs = {x.q, keys, values, length};
  if (!sinks) return program.add1(op, inputs, "attn_out");
  const auto attended = program.add(op, inputs, {"attn_out", "attn_lse"});
  return attend_sinks(builder, share, attended, share.num_heads, 0);
}

/// Writes keys and values into the pages of their sequences and attends to those.
ValueId attend_paged(LayerBuilder& builder, const AttentionShare& share, const QueryKeyValue& x) {
  Program& program = builder.program();
  const ValueId rows = builder.port(Port::kCacheRows);
  const ValueId keys = builder.port(Port::kKeyCache);
  const ValueId values = cached_values(builder, keys);
  const int64_t capacity = builder.cache->num_pages * kPageTokens;
  program.add(make_page_write(capacity), {x.k, rows}, {}, {keys});
  if (values != keys) program.add(make_page_write(capacity), {x.v, rows}, {}, {values});
  if (x.index.choose()) return attend_chosen(builder, share, x, keys, values);
  const std::vector<ValueId> inputs = {x.q,
                                       keys,
                                       values,
                                       builder.port(Port::kCuSeqlens),
                                       builder.port(Port::kCacheLength),
                                       builder.port(Port::kPageTable)};
  const auto attended = program.add(make_paged_attention(attention_spec(builder, share)), inputs,
                                    {"attn_out", "attn_lse"});
  if (!builder.config.attention_sinks) return attended[attention::kO];
  return attend_sinks(builder, share, attended, share.num_heads, 0);
}

/// Attends as the layer's cache asks.
ValueId attend(LayerBuilder& builder, const AttentionShare& share, const QueryKeyValue& x) {
  if (x.chosen.is_set()) return attend_entries(builder, share, x);
  if (!builder.cache) return attend_packed(builder, share, x);
  return builder.cache->is_paged() ? attend_paged(builder, share, x)
                                   : attend_cached(builder, share, x);
}

/// An element's sigmoid is spread as what it gates is, so it needs no heads.
GateSpec gate_spec(const ModelConfig& config) {
  if (config.gate_function == AttentionGate::kSigmoid) return {};
  return {.function = GateFunction::kSoftplus, .of_heads = true};
}

}  // namespace

ValueId build_attention(LayerBuilder& builder, ValueId normed) {
  const ModelConfig& config = builder.config;
  const AttentionShare share = attention_share(builder);
  const QueryKeyValue x = build_attention_inputs(builder, share, normed);
  ValueId attended = attend(builder, share, x);
  if (config.is_compressed())
    return build_grouped_output(builder, share, attended, rotary_spec(builder));
  if (x.up >= 0) {
    attended = builder.program().add1(make_latent_outputs(latent_cache_spec(config)),
                                      {attended, x.up}, "attn_out_of_latents");
  }
  const ValueId out = config.attention_gate
                          ? builder.program().add1(make_sigmoid_gate(gate_spec(config)),
                                                   {attended, x.gate}, "attn_gated")
                          : attended;
  const int64_t inner = config.num_heads * config.value_dim();
  if (share.by_heads)
    return builder.row_linear("attn.o", out, inner, config.hidden_size, config.output_bias,
                              "attn_projected");
  return builder.linear("attn.o", out, config.hidden_size, config.output_bias, "attn_projected");
}

}  // namespace tessera
