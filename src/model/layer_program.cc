#include "model/layer_program.h"

#include "model/attention_blocks.h"
#include "model/mlp_blocks.h"
#include "ops/add/add.h"
#include "ops/embedding/embedding.h"
#include "ops/linear/linear.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "ops/rmsnorm/rmsnorm.h"

namespace tessera {
namespace {

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

std::string layer_kind_name(LayerKind kind) {
  return fmt::format("{}{}_layer", kind.window ? "window_" : "", kind.moe ? "moe" : "dense");
}

LayerProgram build_layer(const ModelConfig& config, LayerKind kind, const BatchShape& shape,
                         const std::optional<CacheShape>& cache) {
  LayerProgram layer{.forward = Program(layer_kind_name(kind))};
  Program& program = layer.forward;
  LayerBuilder builder{config, kind, shape, layer};
  layer.hidden = program.add_input("hidden", {shape.dtype, {shape.num_tokens, config.hidden_size}});
  layer.positions = program.add_input("positions", {DType::kI32, {shape.num_tokens}});

  const auto norm = [&](const char* name, ValueId x) {
    return builder.norm(name, x, config.hidden_size, config.norm_eps);
  };
  const ValueId attention = build_attention(builder, norm("attn_norm", layer.hidden), cache);
  const ValueId middle = program.add1(make_add(), {layer.hidden, attention}, "hidden_mid");
  const ValueId normed = norm("mlp_norm", middle);
  const ValueId mlp = kind.moe ? build_moe(builder, normed)
                               : build_mlp(builder, "mlp", normed, config.dense_inner_size());
  layer.hidden_out = program.add1(make_add(), {middle, mlp}, "hidden_out");

  std::vector<ValueId> outputs = {layer.hidden_out};
  if (kind.moe) {
    outputs.insert(outputs.end(), {layer.balance_loss, layer.z_loss, layer.score_means,
                                   layer.counts, layer.dropped});
  }
  program.set_outputs(std::move(outputs));
  return layer;
}

EmbeddingProgram build_embedding(const ModelConfig& config, const BatchShape& shape) {
  EmbeddingProgram result{.forward = Program("embedding")};
  Program& program = result.forward;
  result.tokens = program.add_input("tokens", {DType::kI32, {shape.num_tokens}});
  const ValueId table = program.add_weight("embedding.weight", table_type(config, shape));
  result.hidden_out =
      program.add1(make_embedding(config.padding_token), {result.tokens, table}, "hidden");
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
