#include "model/attention_blocks.h"

#include "model/rotary.h"
#include "ops/attention/attention.h"
#include "ops/cache_append/cache_append.h"
#include "ops/latent_heads/latent_heads.h"

namespace tessera {
namespace {

/// What attention works on: q A [T, N·D], k A [T, Nkv·D], v A [T, Nkv·Dv], rotated.
struct QueryKeyValue {
  ValueId q = -1;
  ValueId k = -1;
  ValueId v = -1;
};

/// Longest sequence that positions count in, for rotations that depend on it.
int64_t context_length(const LayerBuilder& builder, const std::optional<CacheShape>& cache) {
  if (cache) return cache->capacity;
  const BatchShape& shape = builder.shape;
  return shape.sequence_length > 0 ? shape.sequence_length : shape.num_tokens;
}

RotarySpec rotary_spec(const ModelConfig& config, int64_t context) {
  return {.head_size = config.head_dim(),
          .interleaved = config.rope.interleaved,
          .inverse_frequencies = inverse_frequencies(config.rope, config.rotary_dim(), context),
          .amplitude = static_cast<float>(rotary_amplitude(config.rope))};
}

ValueId build_rotation(LayerBuilder& builder, ValueId x, RotarySpec spec, int64_t num_heads,
                       const char* name) {
  spec.num_heads = num_heads;
  return builder.program().add1(make_rope(std::move(spec)), {x, builder.layer.positions}, name);
}

/// A query or key projection, normed where the model does that.
ValueId build_projection(LayerBuilder& builder, const std::string& name, ValueId normed,
                         int64_t num_heads) {
  const ModelConfig& config = builder.config;
  const int64_t width = num_heads * config.head_dim();
  const ValueId x = builder.linear("attn." + name, normed, width, config.qkv_bias, name);
  if (config.qk_norm == QkNorm::kNone) return x;
  const int64_t size = config.qk_norm == QkNorm::kHead ? config.head_dim() : width;
  return builder.norm(fmt::format("attn.{}_norm", name), x, size, config.norm_eps);
}

QueryKeyValue build_standard(LayerBuilder& builder, ValueId normed, const RotarySpec& rotary) {
  const ModelConfig& config = builder.config;
  const ValueId q = build_projection(builder, "q", normed, config.num_heads);
  const ValueId k = build_projection(builder, "k", normed, config.kv_heads());
  const ValueId v =
      builder.linear("attn.v", normed, config.kv_heads() * config.head_dim(), config.qkv_bias, "v");
  return {build_rotation(builder, q, rotary, config.num_heads, "q_rotated"),
          build_rotation(builder, k, rotary, config.kv_heads(), "k_rotated"), v};
}

/// The queries of latent attention, through a latent of their own where there is one.
ValueId build_latent_queries(LayerBuilder& builder, ValueId normed) {
  const ModelConfig& config = builder.config;
  const LatentConfig& latent = config.latent;
  const int64_t width = config.num_heads * config.head_dim();
  if (latent.query_rank == 0) return builder.linear("attn.q", normed, width, false, "q");
  const ValueId down =
      builder.linear("attn.q_down", normed, latent.query_rank, config.qkv_bias, "q_latent");
  const ValueId latent_normed =
      builder.norm("attn.q_latent_norm", down, latent.query_rank, latent.norm_eps);
  return builder.linear("attn.q_up", latent_normed, width, false, "q");
}

/// Multi-latent attention (DeepSeek-V2, section 2.1): keys and values from one small latent, and a
/// rotated key part of its own that all heads share.
QueryKeyValue build_latent(LayerBuilder& builder, ValueId normed, RotarySpec rotary) {
  const ModelConfig& config = builder.config;
  const LatentConfig& latent = config.latent;
  const int64_t heads = config.num_heads;
  const ValueId down =
      builder.linear("attn.kv_down", normed, latent.kv_rank, config.qkv_bias, "kv_latent");
  const ValueId latent_normed =
      builder.norm("attn.kv_latent_norm", down, latent.kv_rank, latent.norm_eps);
  const ValueId kv = builder.linear("attn.kv_up", latent_normed,
                                    heads * (latent.nope_size + latent.value_size), false, "kv");
  const ValueId shared =
      builder.linear("attn.k_rope", normed, latent.rope_size, config.qkv_bias, "k_shared");

  RotarySpec of_shared = rotary;
  of_shared.head_size = latent.rope_size;
  rotary.offset = latent.nope_size;
  const ValueId q =
      build_rotation(builder, build_latent_queries(builder, normed), rotary, heads, "q_rotated");
  const ValueId k = build_rotation(builder, shared, of_shared, 1, "k_rotated");
  const auto joined = builder.program().add(make_latent_heads({.num_heads = heads,
                                                               .nope_size = latent.nope_size,
                                                               .rope_size = latent.rope_size,
                                                               .value_size = latent.value_size}),
                                            {kv, k}, {"k", "v"});
  return {q, joined[0], joined[1]};
}

AttentionSpec attention_spec(const LayerBuilder& builder) {
  const ModelConfig& config = builder.config;
  return {.num_heads = config.num_heads,
          .num_kv_heads = config.kv_heads(),
          .head_size = config.head_dim(),
          .head_size_v = config.value_dim(),
          .scale = config.attention_scale(),
          .window = builder.kind.window ? config.window : 0,
          .sequence_length = builder.shape.sequence_length};
}

/// Attends to the keys and values of the packed sequences.
ValueId attend_packed(LayerBuilder& builder, const QueryKeyValue& x) {
  LayerProgram& layer = builder.layer;
  layer.cu_seqlens =
      builder.program().add_input("cu_seqlens", {DType::kI32, {builder.shape.max_sequences + 1}});
  const auto op = make_attention(attention_spec(builder));
  return builder.program().add(op, {x.q, x.k, x.v, layer.cu_seqlens}, {"attn_out", "attn_lse"})[0];
}

/// Appends keys and values to the caches and attends to them.
ValueId attend_cached(LayerBuilder& builder, const QueryKeyValue& x, int64_t capacity) {
  LayerProgram& layer = builder.layer;
  Program& program = builder.program();
  const DType dtype = builder.shape.dtype;
  layer.start = program.add_input("start", {DType::kI32, {1}});
  layer.cache_length = program.add_input("cache_length", {DType::kI32, {1}});
  layer.key_cache =
      program.add_accumulator("key_cache", {dtype, {capacity, program.type(x.k).shape[1]}});
  layer.value_cache =
      program.add_accumulator("value_cache", {dtype, {capacity, program.type(x.v).shape[1]}});
  program.add(make_cache_append(capacity), {x.k, layer.start}, {}, {layer.key_cache});
  program.add(make_cache_append(capacity), {x.v, layer.start}, {}, {layer.value_cache});
  const auto op = make_attention_cached(attention_spec(builder));
  return program.add1(op, {x.q, layer.key_cache, layer.value_cache, layer.cache_length},
                      "attn_out");
}

}  // namespace

ValueId build_attention(LayerBuilder& builder, ValueId normed,
                        const std::optional<CacheShape>& cache) {
  const ModelConfig& config = builder.config;
  const RotarySpec rotary = rotary_spec(config, context_length(builder, cache));
  const QueryKeyValue x = config.is_latent() ? build_latent(builder, normed, rotary)
                                             : build_standard(builder, normed, rotary);
  const ValueId out =
      cache ? attend_cached(builder, x, cache->capacity) : attend_packed(builder, x);
  return builder.linear("attn.o", out, config.hidden_size, config.output_bias, "attn_projected");
}

}  // namespace tessera
