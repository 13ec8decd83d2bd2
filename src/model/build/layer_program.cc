#include "model/build/layer_program.h"

#include "model/build/attention_blocks.h"
#include "model/build/mlp_blocks.h"
#include "model/build/moe_blocks.h"
#include "ops/add/add.h"
#include "ops/collective/collective.h"
#include "ops/embedding/embedding.h"
#include "ops/linear/linear.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "ops/linear_cross_entropy/vocab_lse.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/vocab_loss/vocab_loss.h"

namespace tessera {
namespace {

const char* head_weight_name(const ModelConfig& config) {
  return config.tie_embeddings ? "embedding.weight" : "head.weight";
}

/// The rows of the vocabulary that a rank holds; the ranks' may differ by one.
WeightPlacement vocabulary_share(const ModelConfig& config, const StageGroups& groups) {
  const int64_t size = groups.tp->size();
  const int64_t begin = config.vocab_size * groups.tp->rank() / size;
  const int64_t end = config.vocab_size * (groups.tp->rank() + 1) / size;
  return {.slice = Slice::of_rows({config.vocab_size, config.hidden_size}, {{begin, end - begin}}),
          .tp_copies = 1};
}

int64_t first_row(const WeightPlacement& placement) {
  return placement.slice.rows.empty() ? 0 : placement.slice.rows.front().begin;
}

std::string final_norm_name(int64_t depth) {
  return depth == 0 ? "final_norm.weight" : fmt::format("mtp_heads.{}.norm.weight", depth - 1);
}

/// The final norm over hidden states, shared by the loss and the logits.
ValueId build_final_norm(const ModelConfig& config, Program& program, ValueId hidden,
                         int64_t depth) {
  const ValueId weight =
      program.add_weight(final_norm_name(depth), {DType::kF32, {config.hidden_size}});
  return program.add(make_rmsnorm(config.norm_eps), {hidden, weight},
                     {"final_normed", "final_norm.rstd"})[0];
}

/// The loss with the whole vocabulary on this rank.
std::vector<ValueId> build_whole_loss(Program& program, const std::string& weight_name,
                                      const std::vector<ValueId>& inputs, bool with_gradient) {
  if (!with_gradient)
    return program.add(make_linear_cross_entropy({}), inputs, {"loss", "token_loss", "lse"});
  const ValueId grad = program.add_accumulator("grad." + weight_name,
                                               with_dtype(program.type(inputs[1]), DType::kF32));
  return program.add(make_linear_cross_entropy_fused({}), inputs,
                     {"loss", "token_loss", "grad_normed"}, {grad});
}

/// The loss with the vocabulary spread over the tensor-parallel group: every rank finds statistics
/// of its rows' logits for the group's tokens, and each finishes the loss of its own tokens.
std::vector<ValueId> build_spread_loss(HeadProgram& head, const StageGroups& groups, ValueId normed,
                                       ValueId weight, int64_t first, int64_t vocab_size) {
  Program& program = head.forward;
  const int64_t own = program.type(normed).shape[0];
  head.gathered_labels =
      program.add_input("gathered_labels", {DType::kI32, {own * groups.tp->size()}});
  const ValueId gathered =
      program.add1(make_all_gather(groups.tp), {normed}, "final_normed_gathered");
  const auto statistics =
      program.add(make_vocab_lse({.first_row = first, .vocab_size = vocab_size}),
                  {gathered, weight, head.gathered_labels}, {"local_lse", "local_label_logit"});
  std::vector<ValueId> inputs;
  for (const ValueId value : statistics) {
    inputs.push_back(
        program.add1(make_all_to_all(groups.tp), {value}, "all_" + program.value(value).name));
  }
  inputs.insert(inputs.end(), {head.labels, head.scale});
  return program.add(make_vocab_loss(groups.tp->size()), inputs, {"loss", "token_loss"});
}

/// What a layer of multi-token prediction works on. Two matrices instead of one for both halves, so
/// that no operator joins or splits values.
ValueId join_embedding(LayerBuilder& builder) {
  Program& program = builder.program();
  LayerProgram& layer = builder.layer;
  const int64_t size = builder.config.hidden_size;
  layer.embedded = program.add_input("embedded", program.type(layer.hidden));
  const auto project = [&](const std::string& name, ValueId x) {
    const ValueId normed = builder.norm(name + "_norm", x, size, builder.config.norm_eps);
    return builder.linear(name + "_proj", normed, size, false, name + "_projected");
  };
  const ValueId hidden = project("hidden", layer.hidden);
  const ValueId embedded = project("embed", layer.embedded);
  return program.add1(make_add(), {hidden, embedded}, "joined");
}

}  // namespace

std::string layer_kind_name(LayerKind kind) {
  return fmt::format("{}{}{}_layer", kind.mtp ? "mtp_" : "", kind.window ? "window_" : "",
                     kind.moe ? "moe" : "dense");
}

LayerProgram build_layer(const ModelConfig& config, LayerKind kind, const BatchShape& shape,
                         const StageGroups& groups, const std::optional<CacheShape>& cache) {
  LayerProgram layer{.forward = Program(layer_kind_name(kind))};
  Program& program = layer.forward;
  LayerBuilder builder{config, kind, shape, groups, layer};
  layer.hidden =
      program.add_input("hidden", {shape.dtype, {own_tokens(shape, groups), config.hidden_size}});

  const auto norm = [&](const char* name, ValueId x) {
    return builder.norm(name, x, config.hidden_size, config.norm_eps);
  };
  const ValueId start = kind.mtp ? join_embedding(builder) : layer.hidden;
  const ValueId attention = build_attention(builder, norm("attn_norm", start), cache);
  const ValueId middle = program.add1(make_add(), {start, attention}, "hidden_mid");
  const ValueId normed = norm("mlp_norm", middle);
  const ValueId mlp = kind.moe ? build_moe(builder, normed)
                               : build_mlp(builder, "mlp", normed, config.dense_inner_size());
  layer.hidden_out = program.add1(make_add(), {middle, mlp}, "hidden_out");

  std::vector<ValueId> outputs = {layer.hidden_out};
  if (kind.moe) {
    outputs.insert(outputs.end(), {layer.balance_loss, layer.z_loss, layer.score_means,
                                   layer.counts, layer.dropped});
    if (layer.counts_so_far >= 0) outputs.push_back(layer.counts_so_far);
  }
  program.set_outputs(std::move(outputs));
  return layer;
}

EmbeddingProgram build_embedding(const ModelConfig& config, const BatchShape& shape,
                                 const StageGroups& groups) {
  EmbeddingProgram result{.forward = Program("embedding")};
  Program& program = result.forward;
  const WeightPlacement share = vocabulary_share(config, groups);
  result.tokens = program.add_input("tokens", {DType::kI32, {group_tokens(shape, groups)}});
  const ValueId table = program.add_weight("embedding.weight", {shape.dtype, share.slice.shape()});
  result.placements.emplace("embedding.weight", share);
  if (groups.tp->size() == 1) {
    result.hidden_out =
        program.add1(make_embedding(config.padding_token), {result.tokens, table}, "hidden");
  } else {
    const ValueId part = program.add1(make_embedding({.padding_token = config.padding_token,
                                                      .first_row = first_row(share),
                                                      .vocab_size = config.vocab_size}),
                                      {result.tokens, table}, "hidden_part");
    result.hidden_out = program.add1(make_reduce_scatter(groups.tp), {part}, "hidden");
  }
  program.set_outputs({result.hidden_out});
  return result;
}

HeadProgram build_head(const ModelConfig& config, const BatchShape& shape,
                       const StageGroups& groups, bool with_gradient, int64_t depth) {
  HeadProgram head{.forward = Program(depth == 0 ? "head" : "mtp_head")};
  Program& program = head.forward;
  const int64_t own = own_tokens(shape, groups);
  head.hidden = program.add_input("hidden", {shape.dtype, {own, config.hidden_size}});
  head.labels = program.add_input("labels", {DType::kI32, {own}});
  head.scale = program.add_input("scale", {DType::kF32, {1}});
  const ValueId normed = build_final_norm(config, program, head.hidden, depth);
  const WeightPlacement share = vocabulary_share(config, groups);
  const std::string name = head_weight_name(config);
  const ValueId weight = program.add_weight(name, {shape.dtype, share.slice.shape()});
  head.placements.emplace(
      final_norm_name(depth),
      WeightPlacement{.slice = Slice::whole({config.hidden_size}), .tp_copies = groups.tp->size()});
  head.placements.emplace(name, share);
  const auto outputs =
      groups.tp->size() == 1
          ? build_whole_loss(program, name, {normed, weight, head.labels, head.scale},
                             with_gradient)
          : build_spread_loss(head, groups, normed, weight, first_row(share), config.vocab_size);
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
  const ValueId normed = build_final_norm(config, program, result.hidden, 0);
  const ValueId weight = program.add_weight(head_weight_name(config),
                                            {shape.dtype, {config.vocab_size, config.hidden_size}});
  result.logits = program.add1(make_linear(), {normed, weight}, "logits");
  program.set_outputs({result.logits});
  return result;
}

}  // namespace tessera
