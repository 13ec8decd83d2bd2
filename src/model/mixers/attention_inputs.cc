#include "model/mixers/attention_inputs.h"

#include <algorithm>

#include "model/config/rotary.h"
#include "model/mixers/compressed_blocks.h"
#include "model/mixers/index_blocks.h"
#include "ops/collective/collective.h"
#include "ops/latent_heads/latent_heads.h"
#include "ops/norm_rope/norm_rope.h"
#include "ops/scale/scale.h"
#include "ops/sigmoid_gate/sigmoid_gate.h"
#include "ops/spread_norm/spread_norm.h"
#include "ops/unit_norm/unit_norm.h"

namespace tessera {

AttentionShare attention_share(const LayerBuilder& builder) {
  const ModelConfig& config = builder.config;
  const int64_t tp = builder.tp();
  if (tp == 1 || builder.groups.policy.replicated_attention)
    return {.num_heads = config.num_heads, .num_kv_heads = config.kv_heads(), .kv_copies = tp};
  const int64_t copies = std::max<int64_t>(tp / config.kv_heads(), 1);
  return {.by_heads = true,
          .num_heads = config.num_heads / tp,
          .num_kv_heads = config.kv_heads() * copies / tp,
          .kv_parts = tp / copies,
          .kv_part = builder.tp_rank() / copies,
          .kv_copies = copies};
}

Slice head_rows(const Shape& global, bool is_query, const AttentionShare& share,
                const LayerBuilder& builder) {
  if (!share.by_heads) return Slice::whole(global);
  return is_query ? LayerBuilder::row_share(global, builder.tp_rank(), builder.tp())
                  : LayerBuilder::row_share(global, share.kv_part, share.kv_parts);
}

bool caches_latents(const LayerBuilder& builder) {
  return caches_latents(builder.config, builder.shape, builder.cache);
}

LatentCacheSpec latent_cache_spec(const ModelConfig& config) {
  const LatentConfig& latent = config.latent;
  return {.num_heads = config.num_heads,
          .nope_size = latent.nope_size,
          .rope_size = latent.rope_size,
          .value_size = latent.value_size,
          .rank = latent.kv_rank};
}

namespace {

/// Longest sequence that positions count in, for rotations that depend on it.
int64_t context_length(const LayerBuilder& builder) {
  if (builder.cache) return builder.cache->capacity;
  const BatchShape& shape = builder.shape;
  return shape.sequence_length > 0 ? shape.sequence_length : shape.num_tokens;
}

ValueId build_rotation(LayerBuilder& builder, ValueId x, RotarySpec spec, int64_t num_heads,
                       const char* name) {
  if (builder.config.rotary_dim() == 0) return x;
  spec.num_heads = num_heads;
  return builder.program().add1(make_rope(std::move(spec)), {x, builder.port(Port::kPositions)},
                                name);
}

ValueId build_head_linear(LayerBuilder& builder, const AttentionShare& share,
                          const std::string& name, ValueId x, bool is_query, int64_t global_width,
                          bool bias, const std::string& result) {
  const Shape global = {global_width, builder.program().type(x).shape.last()};
  const int64_t query_copies = share.by_heads ? 1 : builder.tp();
  return builder.column_linear(name, x, head_rows(global, is_query, share, builder),
                               is_query ? query_copies : share.kv_copies, bias, result);
}

/// RMSNorm of all heads of a token as one row, of which this rank has some. Where neighbours hold
/// the same heads, the sum over the group counts those several times, as it does all others.
ValueId build_spread_norm(LayerBuilder& builder, const AttentionShare& share,
                          const std::string& name, ValueId x, bool is_query, int64_t width) {
  Program& program = builder.program();
  const CommunicatorPtr& group = builder.groups.tp;
  const int64_t copies = is_query ? 1 : share.kv_copies;
  const ValueId weight = builder.f32_weight(
      name + ".weight",
      {.slice = head_rows({width}, is_query, share, builder), .tp_copies = copies});
  const ValueId own = program.add1(make_square_sums(), {x}, name + ".own_squares");
  const ValueId summed = program.add1(make_reduce_scatter(group), {own}, name + ".squares_part");
  const ValueId squares = program.add1(make_all_gather(group), {summed}, name + ".squares");
  return program.add1(
      make_spread_norm({.num_elements = width * copies, .eps = builder.config.norm_eps}),
      {x, weight, squares}, name);
}

/// Whether heads are normed as they are rotated.
bool norms_in_rotation(const ModelConfig& config) {
  return config.qk_norm == QkNorm::kHead && !config.norm_after_rotation &&
         config.rotary_dim() > 0 && config.head_dim() <= NormRope::kMaxHeadSize;
}

/// Elements of all query or key heads of a token.
int64_t heads_width(const ModelConfig& config, bool is_query) {
  return (is_query ? config.num_heads : config.kv_heads()) * config.head_dim();
}

/// The norm of queries or keys by an operator of its own.
ValueId build_qk_norm(LayerBuilder& builder, const AttentionShare& share, const std::string& name,
                      bool is_query, ValueId x) {
  const ModelConfig& config = builder.config;
  const std::string norm_name = fmt::format("attn.{}_norm", name);
  const int64_t width = heads_width(config, is_query);
  if (config.qk_norm == QkNorm::kL2) {
    return builder.program().add1(make_unit_norm(config.head_dim(), config.norm_eps), {x},
                                  norm_name);
  }
  const bool by_head = config.qk_norm == QkNorm::kHead;
  if (share.by_heads && !by_head)
    return build_spread_norm(builder, share, norm_name, x, is_query, width);
  return builder.norm(norm_name, x, by_head ? config.head_dim() : width, config.norm_eps);
}

/// A query or key projection.
ValueId build_projection(LayerBuilder& builder, const AttentionShare& share,
                         const std::string& name, bool is_query, ValueId x) {
  const ModelConfig& config = builder.config;
  return build_head_linear(builder, share, "attn." + name, x, is_query,
                           heads_width(config, is_query), config.qkv_bias, name);
}

/// The same normed where the model does that before it rotates, by an operator of its own.
ValueId norm_before_rotation(LayerBuilder& builder, const AttentionShare& share,
                             const std::string& name, bool is_query, ValueId projected) {
  const ModelConfig& config = builder.config;
  const bool before = config.qk_norm != QkNorm::kNone && !config.norm_after_rotation;
  if (!before || norms_in_rotation(config)) return projected;
  return build_qk_norm(builder, share, name, is_query, projected);
}

/// A projection normed and rotated at once.
ValueId build_normed_rotation(LayerBuilder& builder, const std::string& name, ValueId projected,
                              RotarySpec rotary, int64_t num_heads) {
  const ModelConfig& config = builder.config;
  rotary.num_heads = num_heads;
  const std::string norm = fmt::format("attn.{}_norm", name);
  const ValueId weight = builder.f32_weight(norm + ".weight", builder.whole({config.head_dim()}));
  return builder.program().add(make_norm_rope(config.norm_eps, rotary),
                               {projected, weight, builder.port(Port::kPositions)},
                               {name + "_rotated", norm + ".rstd"})[0];
}

/// Queries and keys rotated, normed at once where they are not yet. One operator rotates both,
/// unless ranks exchange heads: the queries' exchange then begins before the keys are there.
void rotate(LayerBuilder& builder, const AttentionShare& share, RotarySpec rotary,
            QueryKeyValue& x) {
  if (builder.config.rotary_dim() == 0) return;
  if (norms_in_rotation(builder.config)) {
    x.q = build_normed_rotation(builder, "q", x.q, rotary, share.num_heads);
    x.k = build_normed_rotation(builder, "k", x.k, rotary, share.num_kv_heads);
  } else if (builder.groups.heads->size() > 1) {
    x.q = build_rotation(builder, x.q, rotary, share.num_heads, "q_rotated");
    x.k = build_rotation(builder, x.k, rotary, share.num_kv_heads, "k_rotated");
  } else {
    rotary.num_heads = share.num_heads;
    const auto rotated = builder.program().add(make_rope(std::move(rotary), share.num_kv_heads),
                                               {x.q, x.k, builder.port(Port::kPositions)},
                                               {"q_rotated", "k_rotated"});
    x.q = rotated[Rope::kY];
    x.k = rotated[Rope::kSecondY];
  }
}

/// Values of a projection of x, or of that which keys are made of.
ValueId build_values(LayerBuilder& builder, const AttentionShare& share, ValueId x, ValueId keys) {
  const ModelConfig& config = builder.config;
  Program& program = builder.program();
  ValueId values = keys;
  if (!config.keys_as_values) {
    values = build_head_linear(builder, share, "attn.v", x, false,
                               config.kv_heads() * config.value_dim(), config.qkv_bias, "v");
  }
  if (config.value_norm)
    values =
        program.add1(make_unit_norm(config.value_dim(), config.norm_eps), {values}, "v_normed");
  if (config.value_multiplier == 1.0) return values;
  return program.add1(make_scale(config.value_multiplier), {values}, "v_scaled");
}

QueryKeyValue build_standard(LayerBuilder& builder, const AttentionShare& share, ValueId normed,
                             const RotarySpec& rotary) {
  const ModelConfig& config = builder.config;
  const ValueId x = share.by_heads ? builder.gather_tokens(normed, "attn_in") : normed;
  QueryKeyValue result;
  const ValueId queries = build_projection(builder, share, "q", true, x);
  result.q = norm_before_rotation(builder, share, "q", true, queries);
  const ValueId keys = build_projection(builder, share, "k", false, x);
  result.k = norm_before_rotation(builder, share, "k", false, keys);
  result.v = build_values(builder, share, x, keys);
  if (config.attention_gate) {
    result.gate = build_head_linear(builder, share, "attn.gate", x, true, config.gate_width(),
                                    config.qkv_bias, "attn_gate");
  }
  rotate(builder, share, rotary, result);
  if (config.norm_after_rotation && config.qk_norm != QkNorm::kNone) {
    result.q = build_qk_norm(builder, share, "q", true, result.q);
    result.k = build_qk_norm(builder, share, "k", false, result.k);
  }
  if (config.temperature_scale != 0) {
    result.q = builder.program().add1(make_sigmoid_gate({.function = GateFunction::kIdentity}),
                                      {result.q, builder.port(Port::kTemperatures)}, "q_tempered");
  }
  return result;
}

/// The queries of latent attention, through a latent of their own where there is one, and what an
/// indexer makes of that.
struct IndexedQueries {
  ValueId q;
  IndexValues index = {};
};

IndexedQueries build_latent_queries(LayerBuilder& builder, const AttentionShare& share,
                                    ValueId normed, const RotarySpec& rotary) {
  const ModelConfig& config = builder.config;
  const LatentConfig& latent = config.latent;
  const int64_t width = config.num_heads * config.head_dim();
  const auto gathered = [&](ValueId x, const char* name) {
    return share.by_heads ? builder.gather_tokens(x, name) : x;
  };
  if (latent.query_rank == 0) {
    return {build_head_linear(builder, share, "attn.q", gathered(normed, "attn_in"), true, width,
                              false, "q")};
  }
  const ValueId down =
      builder.linear("attn.q_down", normed, latent.query_rank, config.qkv_bias, "q_latent");
  const ValueId latent_normed =
      builder.norm("attn.q_latent_norm", down, latent.query_rank, latent.norm_eps);
  const ValueId of_all = gathered(latent_normed, "q_latent_gathered");
  IndexedQueries queries{
      build_head_linear(builder, share, "attn.q_up", of_all, true, width, false, "q")};
  if (config.index.is_on()) queries.index = build_index(builder, share, normed, of_all, rotary);
  return queries;
}

/// Queries of latents, and latents as the keys and values of all heads.
QueryKeyValue cache_of_latents(LayerBuilder& builder, const AttentionShare& share, ValueId q,
                               ValueId latent, ValueId shared) {
  Program& program = builder.program();
  const LatentCacheSpec spec = latent_cache_spec(builder.config);
  const ValueId up = builder.matrix(
      "attn.kv_up.weight", {.slice = head_rows({spec.up_rows(), spec.rank}, true, share, builder)});
  return {.q = program.add1(make_latent_queries(spec), {q, up}, "q_of_latents"),
          .k = program.add1(make_latent_keys(), {latent, shared}, "k_of_latents"),
          .v = latent,
          .up = up};
}

/// Multi-latent attention (DeepSeek-V2, section 2.1): keys and values from one small latent, and a
/// rotated key part of its own that all heads share. Latents, not hidden states, are gathered over
/// the tensor-parallel group: they are smaller.
QueryKeyValue build_latent(LayerBuilder& builder, const AttentionShare& share, ValueId normed,
                           RotarySpec rotary) {
  const ModelConfig& config = builder.config;
  const LatentConfig& latent = config.latent;
  const auto gathered = [&](ValueId x, const char* name) {
    return share.by_heads ? builder.gather_tokens(x, name) : x;
  };
  const ValueId down =
      builder.linear("attn.kv_down", normed, latent.kv_rank, config.qkv_bias, "kv_latent");
  const ValueId latent_normed =
      builder.norm("attn.kv_latent_norm", down, latent.kv_rank, latent.norm_eps);
  const bool cached = caches_latents(builder);
  const ValueId kv =
      cached ? -1
             : build_head_linear(
                   builder, share, "attn.kv_up", gathered(latent_normed, "kv_latent_gathered"),
                   true, config.num_heads * (latent.nope_size + latent.value_size), false, "kv");
  const ValueId shared =
      builder.linear("attn.k_rope", normed, latent.rope_size, config.qkv_bias, "k_shared");

  RotarySpec of_shared = rotary;
  of_shared.head_size = latent.rope_size;
  rotary.offset = latent.nope_size;
  const IndexedQueries queries = build_latent_queries(builder, share, normed, rotary);
  const ValueId q = build_rotation(builder, queries.q, rotary, share.num_heads, "q_rotated");
  const ValueId k =
      build_rotation(builder, gathered(shared, "k_shared_gathered"), of_shared, 1, "k_rotated");
  if (cached) {
    QueryKeyValue of_latents = cache_of_latents(builder, share, q, latent_normed, k);
    of_latents.index = queries.index;
    return of_latents;
  }
  const auto joined = builder.program().add(make_latent_heads({.num_heads = share.num_heads,
                                                               .nope_size = latent.nope_size,
                                                               .rope_size = latent.rope_size,
                                                               .value_size = latent.value_size}),
                                            {kv, k}, {"k", "v"});
  return {.q = q, .k = joined[0], .v = joined[1], .index = queries.index};
}

}  // namespace

RotarySpec rotary_spec(const LayerBuilder& builder) {
  const ModelConfig& config = builder.config;
  if (config.rotary_dim() == 0) return {};
  const int64_t length = context_length(builder);
  return {.head_size = config.head_dim(),
          .interleaved = config.rope.interleaved,
          .inverse_frequencies = inverse_frequencies(config.rope, config.rotary_dim(), length),
          .amplitude = static_cast<float>(rotary_amplitude(config.rope, length))};
}

QueryKeyValue build_attention_inputs(LayerBuilder& builder, const AttentionShare& share,
                                     ValueId normed) {
  const ModelConfig& config = builder.config;
  if (config.rotary_dim() > 0) builder.port(Port::kPositions);
  const RotarySpec rotary = rotary_spec(builder);
  if (config.is_compressed()) return build_compressed(builder, share, normed, rotary);
  return config.is_latent() ? build_latent(builder, share, normed, rotary)
                            : build_standard(builder, share, normed, rotary);
}

}  // namespace tessera
