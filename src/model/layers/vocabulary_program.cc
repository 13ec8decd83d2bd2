#include "model/layers/vocabulary_program.h"

#include "model/layers/residual_blocks.h"
#include "ops/choose_token/choose_token.h"
#include "ops/collective/collective.h"
#include "ops/embedding/embedding.h"
#include "ops/layer_norm/layer_norm.h"
#include "ops/linear/linear.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "ops/linear_cross_entropy/vocab_lse.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/softcap/softcap.h"
#include "ops/vocab_loss/vocab_loss.h"

namespace tessera {
namespace {

constexpr const char* kHeadBias = "head.bias";

const char* head_weight_name(const ModelConfig& config) {
  return config.tie_embeddings ? "embedding.weight" : "head.weight";
}

/// The rows of the vocabulary that a rank holds; the ranks' may differ by one.
WeightPlacement vocabulary_share(const ModelConfig& config, const StageGroups& groups) {
  const int64_t size = groups.tp->size();
  const int64_t begin = config.vocab_size * groups.tp->rank() / size;
  const int64_t end = config.vocab_size * (groups.tp->rank() + 1) / size;
  return {.slice = Slice::of_rows({config.vocab_size, config.hidden_size}, {{begin, end - begin}}),
          .tp_copies = 1,
          .frozen = config.lora.is_on()};
}

/// The same rows of a vector.
WeightPlacement bias_share(const WeightPlacement& share) {
  WeightPlacement own = share;
  own.slice = Slice::of_rows({share.slice.global[0]}, share.slice.rows);
  return own;
}

int64_t first_row(const WeightPlacement& placement) {
  return placement.slice.rows.empty() ? 0 : placement.slice.rows.front().begin;
}

/// The final norm over hidden states, shared by the loss and the logits. What divides the logits
/// divides what they are made of.
ValueId build_final_norm(const ModelConfig& config, ModelProgram& head, const StageGroups& groups,
                         ValueId hidden, int64_t depth) {
  Program& program = head.forward;
  const auto vector = [&](const std::string& name) {
    head.placements.emplace(name, WeightPlacement{.slice = Slice::whole({config.hidden_size}),
                                                  .tp_copies = groups.tp->size(),
                                                  .frozen = config.lora.is_on()});
    return program.add_weight(name, {DType::kF32, {config.hidden_size}});
  };
  const ValueId weight = vector(head_norm_name(depth));
  const ValueId normed =
      config.norm == NormKind::kRms
          ? program.add(make_rmsnorm(config.norm_eps), {hidden, weight},
                        {"final_normed", "final_norm.rstd"})[0]
          : program.add1(make_layer_norm(config.norm_eps),
                         {hidden, weight, vector(head_norm_bias_name(depth))}, "final_normed");
  return add_scaled(program, normed, 1.0 / config.logits_divisor, "final_scaled");
}

/// What makes logits of a head's normed states.
struct HeadWeights {
  std::string name;  ///< of the matrix
  ValueId weight = -1;
  ValueId bias = -1;  ///< -1: none
  int64_t first_row = 0;
};

/// This rank's rows of them.
HeadWeights add_head_weights(const ModelConfig& config, DType dtype, const StageGroups& groups,
                             ModelProgram& head) {
  Program& program = head.forward;
  const WeightPlacement share = vocabulary_share(config, groups);
  HeadWeights weights{.name = head_weight_name(config), .first_row = first_row(share)};
  weights.weight = program.add_weight(weights.name, {dtype, share.slice.shape()});
  head.placements.emplace(weights.name, share);
  if (!config.head_bias) return weights;
  const WeightPlacement of_bias = bias_share(share);
  weights.bias = program.add_weight(kHeadBias, {DType::kF32, of_bias.slice.shape()});
  head.placements.emplace(kHeadBias, of_bias);
  return weights;
}

/// The loss with the whole vocabulary on this rank.
std::vector<ValueId> build_whole_loss(ModelProgram& head, const ModelConfig& config, ValueId normed,
                                      const HeadWeights& weights, bool with_gradient) {
  Program& program = head.forward;
  std::vector<ValueId> inputs = {normed, weights.weight, head.at(Port::kLabels),
                                 head.at(Port::kLossScale)};
  CrossEntropySpec spec;
  spec.weighted = head.ports.has(Port::kTokenWeights);
  spec.biased = config.head_bias;
  spec.frozen = head.placements.at(weights.name).frozen;
  spec.softcap = static_cast<float>(config.logit_softcap);
  if (spec.weighted) inputs.push_back(head.at(Port::kTokenWeights));
  if (spec.biased) inputs.push_back(weights.bias);
  if (!with_gradient)
    return program.add(make_linear_cross_entropy(spec), inputs, {"loss", "token_loss", "lse"});
  std::vector<ValueId> sums;
  const auto add_sum = [&](ValueId weight) {
    sums.push_back(program.add_accumulator("grad." + program.value(weight).name,
                                           with_dtype(program.type(weight), DType::kF32)));
    head.accumulators.push_back({weight, sums.back()});
  };
  add_sum(weights.weight);
  if (spec.biased) add_sum(weights.bias);
  return program.add(make_linear_cross_entropy_fused(spec), inputs,
                     {"loss", "token_loss", "grad_normed"}, sums);
}

/// The loss with the vocabulary spread over the tensor-parallel group: every rank finds statistics
/// of its rows' logits for the group's tokens, and each finishes the loss of its own tokens.
std::vector<ValueId> build_spread_loss(ModelProgram& head, const PortContext& context,
                                       ValueId normed, const HeadWeights& weights) {
  Program& program = head.forward;
  const StageGroups& groups = context.groups;
  const ValueId labels = add_port(program, head.ports, Port::kGatheredLabels, context);
  const ValueId gathered =
      program.add1(make_all_gather(groups.tp), {normed}, "final_normed_gathered");
  const ModelConfig& config = context.config;
  std::vector<ValueId> operands = {gathered, weights.weight, labels};
  if (config.head_bias) operands.push_back(weights.bias);
  const auto statistics =
      program.add(make_vocab_lse({.first_row = weights.first_row,
                                  .vocab_size = config.vocab_size,
                                  .cut = {.softcap = static_cast<float>(config.logit_softcap),
                                          .biased = config.head_bias}}),
                  operands, {"local_lse", "local_label_logit"});
  std::vector<ValueId> inputs;
  for (const ValueId value : statistics) {
    inputs.push_back(
        program.add1(make_all_to_all(groups.tp), {value}, "all_" + program.value(value).name));
  }
  inputs.insert(inputs.end(), {head.at(Port::kLabels), head.at(Port::kLossScale)});
  const bool weighted = head.ports.has(Port::kTokenWeights);
  if (weighted) inputs.push_back(head.at(Port::kTokenWeights));
  return program.add(make_vocab_loss(groups.tp->size(), weighted), inputs, {"loss", "token_loss"});
}

}  // namespace

std::string head_norm_name(int64_t depth) {
  return depth == 0 ? "final_norm.weight" : fmt::format("mtp_heads.{}.norm.weight", depth - 1);
}

std::string head_norm_bias_name(int64_t depth) {
  return depth == 0 ? "final_norm.bias" : fmt::format("mtp_heads.{}.norm.bias", depth - 1);
}

ModelProgram build_embedding(const ModelConfig& config, const BatchShape& shape,
                             const StageGroups& groups) {
  const PortContext context{
      .role = ProgramRole::kEmbedding, .config = config, .shape = shape, .groups = groups};
  ModelProgram result{.forward = Program("embedding")};
  Program& program = result.forward;
  const WeightPlacement share = vocabulary_share(config, groups);
  const ValueId tokens = add_port(program, result.ports, Port::kTokens, context);
  const ValueId table = program.add_weight("embedding.weight", {shape.dtype, share.slice.shape()});
  result.placements.emplace("embedding.weight", share);
  ValueId rows;
  if (groups.tp->size() == 1) {
    rows = program.add1(make_embedding(config.padding_token), {tokens, table}, "hidden");
  } else {
    const ValueId part = program.add1(make_embedding({.padding_token = config.padding_token,
                                                      .first_row = first_row(share),
                                                      .vocab_size = config.vocab_size}),
                                      {tokens, table}, "hidden_part");
    rows = program.add1(make_reduce_scatter(groups.tp), {part}, "hidden");
  }
  const ValueId scaled = add_scaled(program, rows, config.embedding_multiplier, "hidden_scaled");
  result.ports.set(Port::kHiddenOut, spread_embedding(config, program, scaled));
  finish_ports(program, result.ports, context);
  return result;
}

ModelProgram build_head(const ModelConfig& config, const BatchShape& shape,
                        const StageGroups& groups, bool with_gradient, int64_t depth) {
  const PortContext context{
      .role = ProgramRole::kHead, .config = config, .shape = shape, .groups = groups};
  ModelProgram head{.forward = Program(depth == 0 ? "head" : "mtp_head")};
  Program& program = head.forward;
  const auto port = [&](Port which) { return add_port(program, head.ports, which, context); };
  const ValueId hidden = port(Port::kHidden);
  for (const Port needed : {Port::kLabels, Port::kLossScale}) port(needed);
  if (shape.weighted_tokens) port(Port::kTokenWeights);
  const ValueId normed = build_final_norm(
      config, head, groups, collapse_for_head(config, groups, head, hidden, depth), depth);
  const HeadWeights weights = add_head_weights(config, shape.dtype, groups, head);
  const auto outputs = groups.tp->size() == 1
                           ? build_whole_loss(head, config, normed, weights, with_gradient)
                           : build_spread_loss(head, context, normed, weights);
  head.ports.set(Port::kLoss, outputs[0]);
  head.ports.set(Port::kTokenLoss, outputs[1]);
  finish_ports(program, head.ports, context);
  return head;
}

ModelProgram build_logits(const ModelConfig& config, const BatchShape& shape, int64_t chosen_rows) {
  const StageGroups groups = single_rank_groups();
  const PortContext context{.role = ProgramRole::kLogits,
                            .config = config,
                            .shape = shape,
                            .groups = groups,
                            .chosen_rows = chosen_rows};
  ModelProgram result{.forward = Program("logits")};
  Program& program = result.forward;
  ValueId hidden = add_port(program, result.ports, Port::kHidden, context);
  if (port_rule(Port::kChosenRows).present(context)) {
    const ValueId rows = add_port(program, result.ports, Port::kChosenRows, context);
    hidden = program.add1(make_embedding(), {rows, hidden}, "chosen_hidden");
  }
  const ValueId normed = build_final_norm(config, result, groups,
                                          collapse_for_head(config, groups, result, hidden), 0);
  const HeadWeights weights = add_head_weights(config, shape.dtype, groups, result);
  std::vector<ValueId> operands = {normed, weights.weight};
  if (config.head_bias) operands.push_back(weights.bias);
  const bool caps = config.logit_softcap > 0;
  ValueId logits =
      program.add1(make_linear(config.head_bias), operands, caps ? "products" : "logits");
  if (caps) logits = program.add1(make_softcap(config.logit_softcap), {logits}, "logits");
  result.ports.set(Port::kLogits, logits);
  if (chosen_rows > 0) {
    const ValueId rules = add_port(program, result.ports, Port::kTokenRules, context);
    const auto chosen =
        program.add(make_choose_token(), {logits, rules}, {"chosen_token", "log_probability"});
    result.ports.set(Port::kChosenToken, chosen[ChooseToken::kToken]);
    result.ports.set(Port::kChosenLogProbability, chosen[ChooseToken::kLogProbability]);
  }
  finish_ports(program, result.ports, context);
  return result;
}

}  // namespace tessera
