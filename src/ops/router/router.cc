#include "ops/router/router.h"

#include <cmath>
#include <limits>

#include "ops/router/router_workspace.h"

namespace tessera {
namespace {

void check_groups(const RouterSpec& spec) {
  require(spec.num_groups >= 1 && spec.num_experts % spec.num_groups == 0,
          "router: {} experts do not fall into {} equal groups", spec.num_experts, spec.num_groups);
  require(spec.top_groups >= 1 && spec.top_groups <= spec.num_groups,
          "router: top_groups is {}, expected from 1 to the {} groups", spec.top_groups,
          spec.num_groups);
  const int64_t group_size = spec.num_experts / spec.num_groups;
  require(spec.top_k <= spec.top_groups * group_size,
          "router: top_k is {}, but {} groups of {} experts leave only {} to choose from",
          spec.top_k, spec.top_groups, group_size, spec.top_groups * group_size);
  require(spec.group_score != GroupScore::kTopTwoSum || spec.num_groups == 1 || group_size >= 2,
          "router: groups ranked by their two best experts need at least 2 experts, these have {}",
          group_size);
  require(spec.balance_group_size >= 1 && spec.num_experts % spec.balance_group_size == 0,
          "router: {} experts do not fall into groups of {} for the balance loss", spec.num_experts,
          spec.balance_group_size);
}

void check_spec(const RouterSpec& spec) {
  require(spec.num_experts >= 1, "router: num_experts is {}, expected at least 1",
          spec.num_experts);
  require(spec.top_k >= 1 && spec.top_k <= spec.num_experts,
          "router: top_k is {}, expected from 1 to the {} experts", spec.top_k, spec.num_experts);
  require(spec.score == ScoreFunction::kSoftmax || spec.order == ScoreOrder::kBeforeTopK,
          "router: sigmoid scores do not depend on which experts are chosen; take them before "
          "top-k, with normalize_top_k where they should sum to 1");
  require(std::isfinite(spec.scaling_factor), "router: the scaling factor is {}",
          spec.scaling_factor);
  check_groups(spec);
}

std::string_view scope_name(BalanceScope scope) {
  switch (scope) {
    case BalanceScope::kMicroBatch:
      return "micro_batch";
    case BalanceScope::kSequence:
      return "sequence";
    case BalanceScope::kGlobalBatch:
      return "global_batch";
  }
  throw InternalError("router: unknown balance scope");
}

bool is_activation(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16;
}

/// The forward and the backward product each multiply [T, H] with [E, H] this often.
double product_flops(const ValueType& x, int64_t num_experts) {
  return 2.0 * static_cast<double>(x.shape.num_elements()) * static_cast<double>(num_experts);
}

ValueType f32(const Shape& shape) {
  return {.dtype = DType::kF32, .shape = shape};
}

}  // namespace

Router::Router(const RouterSpec& spec) : spec_(spec) {
  check_spec(spec);
}

int Router::scope_input() const {
  if (spec_.balance_scope == BalanceScope::kMicroBatch) return -1;
  return spec_.expert_bias ? 3 : 2;
}

std::string Router::attributes() const {
  std::string text = fmt::format("experts={} top_k={} score={}{}", spec_.num_experts, spec_.top_k,
                                 spec_.score == ScoreFunction::kSoftmax ? "softmax" : "sigmoid",
                                 spec_.order == ScoreOrder::kAfterTopK ? " after_top_k" : "");
  if (spec_.normalize_top_k) text += " normalize";
  if (spec_.scaling_factor != 1.0) text += fmt::format(" scale={}", spec_.scaling_factor);
  if (spec_.expert_bias) text += " bias";
  if (spec_.num_groups > 1)
    text += fmt::format(" groups={}/{}", spec_.top_groups, spec_.num_groups);
  if (spec_.force_balanced) text += " force_balanced";
  if (spec_.balance_group_size > 1) {
    text += fmt::format(" balance_group={}", spec_.balance_group_size);
  }
  return text + fmt::format(" balance={}", scope_name(spec_.balance_scope));
}

std::vector<ValueType> Router::infer(std::span<const ValueType> inputs) const {
  const int64_t num_experts = spec_.num_experts;
  const size_t expected = 2 + (spec_.expert_bias ? 1 : 0) + (scope_input() >= 0 ? 1 : 0);
  check_shape(*this, inputs.size() == expected, "takes {} inputs, got {}", expected, inputs.size());
  const ValueType& x = inputs[0];
  check_shape(*this, is_activation(x.dtype) && x.shape.rank() == 2 && !x.ragged(),
              "x must be f32 or bf16 [T, H], got {}", x.to_string());
  const auto check_f32 = [&](int idx, std::string_view what, const Shape& shape) {
    const ValueType& type = inputs[static_cast<size_t>(idx)];
    check_shape(*this, type == f32(shape), "{} must be f32 {}, got {}", what, shape.to_string(),
                type.to_string());
  };
  check_f32(1, "weight", {num_experts, x.shape[1]});
  if (spec_.expert_bias) check_f32(bias_input(), "expert_bias", {num_experts});
  if (spec_.balance_scope == BalanceScope::kGlobalBatch) {
    check_f32(scope_input(), "prior_counts", {num_experts});
  }
  if (spec_.balance_scope == BalanceScope::kSequence) {
    const ValueType& cu_seqlens = inputs[static_cast<size_t>(scope_input())];
    check_shape(
        *this,
        cu_seqlens.dtype == DType::kI32 && cu_seqlens.shape.rank() == 1 && cu_seqlens.shape[0] >= 1,
        "cu_seqlens must be i32 [num_seqs + 1], got {}", cu_seqlens.to_string());
  }
  const int64_t num_tokens = x.shape[0];
  const Shape shape_TK{num_tokens, spec_.top_k};
  return {f32(shape_TK),
          {.dtype = DType::kI32, .shape = shape_TK},
          f32({num_tokens, num_experts}),
          f32({num_experts}),
          f32({1}),
          f32({1}),
          f32({num_experts})};
}

Cost Router::cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = product_flops(inputs[0], spec_.num_experts);
  return cost;
}

int64_t Router::cpu_workspace_bytes(std::span<const ValueType> inputs) const {
  const bool by_sequence = spec_.balance_scope == BalanceScope::kSequence;
  const RouterSizes sizes{
      .num_tokens = inputs[0].shape[0],
      .hidden_size = inputs[0].shape[1],
      .num_experts = spec_.num_experts,
      .num_segments = by_sequence ? inputs[static_cast<size_t>(scope_input())].shape[0] - 1 : 1};
  return RouterWorkspace::of_forward(sizes).num_bytes;
}

void Router::differentiate(GradientBuilder& builder) const {
  const auto grad_probs = builder.grad_output(RouterOutput::kProbs);
  const auto grad_balance = builder.grad_output(RouterOutput::kBalanceLoss);
  const auto grad_z = builder.grad_output(RouterOutput::kZLoss);
  const auto grad_means = builder.grad_output(RouterOutput::kScoreMeans);
  const auto grad_logits = builder.grad_output(RouterOutput::kLogits);
  const RouterGradients gradients{.probs = grad_probs.has_value(),
                                  .balance_loss = grad_balance.has_value(),
                                  .z_loss = grad_z.has_value(),
                                  .score_means = grad_means.has_value(),
                                  .logits = grad_logits.has_value(),
                                  .x = builder.needs_grad(0),
                                  .weight = builder.needs_grad(1)};
  if (!grad_probs && !grad_balance && !grad_z && !grad_means && !grad_logits) return;
  std::vector<ValueId> inputs{builder.input(0), builder.input(1),
                              builder.output(RouterOutput::kLogits),
                              builder.output(RouterOutput::kExpertIdx)};
  if (gradients.balance_loss) {
    if (spec_.balance_scope != BalanceScope::kSequence) {
      inputs.push_back(builder.output(RouterOutput::kCounts));
    }
    if (scope_input() >= 0) inputs.push_back(builder.input(scope_input()));
  }
  for (const auto& grad : {grad_probs, grad_balance, grad_z, grad_means, grad_logits}) {
    if (grad) inputs.push_back(*grad);
  }
  const auto accumulators = gradients.weight ? std::vector<int>{1} : std::vector<int>{};
  const auto outputs =
      builder.emit(std::make_shared<RouterBackward>(spec_, gradients), inputs, accumulators);
  if (gradients.x) builder.set_grad_input(0, outputs[0]);
}

std::vector<ValueType> RouterBackward::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() >= 5, "takes at least 5 inputs, got {}", inputs.size());
  if (gradients_.addend) check_addend(*this, inputs.back(), inputs[0]);
  std::vector<ValueType> outputs;
  if (gradients_.x) outputs.push_back(inputs[0]);
  if (gradients_.weight) outputs.push_back(inputs[1]);
  return outputs;
}

Cost RouterBackward::cost(std::span<const ValueType> inputs,
                          std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  const int products = (gradients_.x ? 1 : 0) + (gradients_.weight ? 1 : 0);
  cost.flops = products * product_flops(inputs[0], spec_.num_experts);
  return cost;
}

int64_t RouterBackward::cpu_workspace_bytes(std::span<const ValueType> inputs) const {
  const bool by_sequence =
      gradients_.balance_loss && spec_.balance_scope == BalanceScope::kSequence;
  const RouterSizes sizes{.num_tokens = inputs[0].shape[0],
                          .hidden_size = inputs[0].shape[1],
                          .num_experts = spec_.num_experts,
                          .num_segments = by_sequence ? inputs[4].shape[0] - 1 : 1};
  return RouterWorkspace::of_backward(sizes).num_bytes;
}

OperatorPtr RouterBackward::with_addend(std::span<const ValueType> /*inputs*/) const {
  if (!gradients_.x || gradients_.addend) return nullptr;
  RouterGradients gradients = gradients_;
  gradients.addend = true;
  return std::make_shared<RouterBackward>(spec_, gradients);
}

OperatorPtr make_router(const RouterSpec& spec) {
  return std::make_shared<Router>(spec);
}

}  // namespace tessera
