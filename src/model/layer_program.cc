#include "model/layer_program.h"

#include "model/mlp_blocks.h"
#include "ops/add/add.h"
#include "ops/attention/attention.h"
#include "ops/cache_append/cache_append.h"
#include "ops/embedding/embedding.h"
#include "ops/linear/linear.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/rope/rope.h"

namespace tessera {
namespace {

ValueId build_norm(LayerBuilder& builder, const std::string& name, ValueId x) {
  const ValueId weight = builder.vector(name + ".weight", builder.config.hidden_size);
  return builder.program().add(make_rmsnorm(builder.config.norm_eps), {x, weight},
                               {name, name + ".rstd"})[0];
}

/// One of the query, key and value projections, [T, heads · head size].
ValueId build_projection(LayerBuilder& builder, const char* name, ValueId normed,
                         int64_t num_heads) {
  const int64_t width = num_heads * builder.config.head_dim();
  const ValueId weight =
      builder.matrix(fmt::format("attn.{}.weight", name), width, builder.config.hidden_size);
  return builder.program().add1(make_linear(), {normed, weight}, name);
}

ValueId build_rotation(LayerBuilder& builder, ValueId x, int64_t num_heads, const char* name) {
  const int64_t head_size = builder.config.head_dim();
  const RotarySpec spec{
      .num_heads = num_heads,
      .head_size = head_size,
      .inverse_frequencies = default_inverse_frequencies(head_size, builder.config.rope_base)};
  return builder.program().add1(make_rope(spec), {x, builder.layer.positions}, name);
}

AttentionSpec attention_spec(const ModelConfig& config, const BatchShape& shape) {
  return {.num_heads = config.num_heads,
          .num_kv_heads = config.kv_heads(),
          .head_size = config.head_dim(),
          .window = config.window,
          .sequence_length = shape.sequence_length};
}

/// Attends to the keys and values of the packed sequences.
ValueId attend_packed(LayerBuilder& builder, ValueId q, ValueId k, ValueId v) {
  LayerProgram& layer = builder.layer;
  layer.cu_seqlens =
      builder.program().add_input("cu_seqlens", {DType::kI32, {builder.shape.max_sequences + 1}});
  const auto op = make_attention(attention_spec(builder.config, builder.shape));
  return builder.program().add(op, {q, k, v, layer.cu_seqlens}, {"attn_out", "attn_lse"})[0];
}

/// Appends keys and values to the caches and attends to them.
ValueId attend_cached(LayerBuilder& builder, ValueId q, ValueId k, ValueId v, int64_t capacity) {
  LayerProgram& layer = builder.layer;
  Program& program = builder.program();
  const int64_t width = builder.config.kv_heads() * builder.config.head_dim();
  layer.start = program.add_input("start", {DType::kI32, {1}});
  layer.cache_length = program.add_input("cache_length", {DType::kI32, {1}});
  layer.key_cache = program.add_accumulator("key_cache", {builder.shape.dtype, {capacity, width}});
  layer.value_cache =
      program.add_accumulator("value_cache", {builder.shape.dtype, {capacity, width}});
  program.add(make_cache_append(capacity), {k, layer.start}, {}, {layer.key_cache});
  program.add(make_cache_append(capacity), {v, layer.start}, {}, {layer.value_cache});
  const auto op = make_attention_cached(attention_spec(builder.config, builder.shape));
  return program.add1(op, {q, layer.key_cache, layer.value_cache, layer.cache_length}, "attn_out");
}

ValueId build_attention(LayerBuilder& builder, ValueId normed,
                        const std::optional<CacheShape>& cache) {
  const ModelConfig& config = builder.config;
  const ValueId q = build_projection(builder, "q", normed, config.num_heads);
  const ValueId k = build_projection(builder, "k", normed, config.kv_heads());
  const ValueId v = build_projection(builder, "v", normed, config.kv_heads());
  const ValueId q_rotated = build_rotation(builder, q, config.num_heads, "q_rotated");
  const ValueId k_rotated = build_rotation(builder, k, config.kv_heads(), "k_rotated");
  const ValueId out = cache ? attend_cached(builder, q_rotated, k_rotated, v, cache->capacity)
                            : attend_packed(builder, q_rotated, k_rotated, v);
  const ValueId weight =
      builder.matrix("attn.o.weight", config.hidden_size, config.num_heads * config.head_dim());
  return builder.program().add1(make_linear(), {out, weight}, "attn_projected");
}

ValueType table_type(const ModelConfig& config, const BatchShape& shape) {
  return {shape.dtype, {config.vocab_size, config.hidden_size}};
}

const char* head_weight_name(const ModelConfig& config) {
  return config.tie_embeddings ? "embedding.weight" : "head.weight";
}

/// The final norm over hidden states, shared by the loss and the logits.
ValueId build_final_norm(const ModelConfig& config, Program& program, ValueId hidden) {
  const ValueId weight =
      program.add_weight("final_norm.weight", {DType::kF32, {config.hidden_size}});
  return program.add(make_rmsnorm(config.norm_eps), {hidden, weight},
                     {"final_normed", "final_norm.rstd"})[0];
}

}  // namespace

LayerProgram build_layer(const ModelConfig& config, bool moe, const BatchShape& shape,
                         const std::optional<CacheShape>& cache) {
  LayerProgram layer{.forward = Program(moe ? "moe_layer" : "dense_layer")};
  Program& program = layer.forward;
  LayerBuilder builder{config, shape, layer};
  layer.hidden = program.add_input("hidden", {shape.dtype, {shape.num_tokens, config.hidden_size}});
  layer.positions = program.add_input("positions", {DType::kI32, {shape.num_tokens}});

  const ValueId attention =
      build_attention(builder, build_norm(builder, "attn_norm", layer.hidden), cache);
  const ValueId middle = program.add1(make_add(), {layer.hidden, attention}, "hidden_mid");
  const ValueId normed = build_norm(builder, "mlp_norm", middle);
  const ValueId mlp = moe ? build_moe(builder, normed)
                          : build_mlp(builder, "mlp", normed, config.dense_inner_size());
  layer.hidden_out = program.add1(make_add(), {middle, mlp}, "hidden_out");

  std::vector<ValueId> outputs = {layer.hidden_out};
  if (moe)
    outputs.insert(outputs.end(), {layer.balance_loss, layer.z_loss, layer.counts, layer.dropped});
  program.set_outputs(std::move(outputs));
  return layer;
}

EmbeddingProgram build_embedding(const ModelConfig& config, const BatchShape& shape) {
  EmbeddingProgram result{.forward = Program("embedding")};
  Program& program = result.forward;
  result.tokens = program.add_input("tokens", {DType::kI32, {shape.num_tokens}});
  const ValueId table = program.add_weight("embedding.weight", table_type(config, shape));
  result.hidden_out = program.add1(make_embedding(), {result.tokens, table}, "hidden");
  program.set_outputs({result.hidden_out});
  return result;
}

HeadProgram build_head(const ModelConfig& config, const BatchShape& shape, bool with_gradient) {
  HeadProgram head{.forward = Program("head")};
  Program& program = head.forward;
  head.hidden = program.add_input("hidden", {shape.dtype, {shape.num_tokens, config.hidden_size}});
  head.labels = program.add_input("labels", {DType::kI32, {shape.num_tokens}});
  head.scale = program.add_input("scale", {DType::kF32, {1}});
  const ValueId normed = build_final_norm(config, program, head.hidden);
  const ValueType type = table_type(config, shape);
  const ValueId weight = program.add_weight(head_weight_name(config), type);
  const std::vector<ValueId> inputs = {normed, weight, head.labels, head.scale};
  std::vector<ValueId> outputs;
  if (with_gradient) {
    const ValueId grad = program.add_accumulator(fmt::format("grad.{}", head_weight_name(config)),
                                                 with_dtype(type, DType::kF32));
    outputs = program.add(make_linear_cross_entropy_fused({}), inputs,
                          {"loss", "token_loss", "grad_normed"}, {grad});
  } else {
    outputs = program.add(make_linear_cross_entropy({}), inputs, {"loss", "token_loss", "lse"});
  }
  head.loss = outputs[0];
  head.token_loss = outputs[1];
  program.set_outputs({head.loss, head.token_loss});
  return head;
}

LogitsProgram build_logits(const ModelConfig& config, const BatchShape& shape) {
  LogitsProgram result{.forward = Program("logits")};
  Program& program = result.forward;
  result.hidden =
      program.add_input("hidden", {shape.dtype, {shape.num_tokens, config.hidden_size}});
  const ValueId normed = build_final_norm(config, program, result.hidden);
  const ValueId weight = program.add_weight(head_weight_name(config), table_type(config, shape));
  result.logits = program.add1(make_linear(), {normed, weight}, "logits");
  program.set_outputs({result.logits});
  return result;
}

}  // namespace tessera
