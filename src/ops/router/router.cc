#include "ops/router/router.h"

#include <cmath>
#include <limits>

#include "ops/storage.h"

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
          "router: scores of one logit each do not depend on which experts are chosen; take them "
          "before "
          "top-k, with normalize_top_k where they should sum to 1");
  require(std::isfinite(spec.scaling_factor), "router: the scaling factor is {}",
          spec.scaling_factor);
  require(
      !spec.padding || (spec.balance_scope == BalanceScope::kMicroBatch && !spec.replay),
      "router: with tokens that fill a micro-batch, balance is taken outside of it, and choices "
      "are not given");
  check_groups(spec);
}

std::string_view scope_name(BalanceScope scope) {
  switch (scope) {
    case BalanceScope::kMicroBatch:
      return "micro_batch";
    case BalanceScope::kSequence:
      return "sequence";
  }
  throw InternalError("router: unknown balance scope");
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

OperandSet<Router::Input> Router::input_set() const {
  return OperandSet<Input>{kX, kWeight}
      .add(kBias, spec_.logit_bias)
      .add(kExpertBias, spec_.expert_bias)
      .add(kCuSeqlens, spec_.balance_scope == BalanceScope::kSequence)
      .add(kReplayed, spec_.replay)
      .add(kSegments, spec_.padding);
}

std::string Router::attributes() const {
  std::string text = fmt::format("experts={} top_k={} score={}{}", spec_.num_experts, spec_.top_k,
                                 score_name(spec_.score),
                                 spec_.order == ScoreOrder::kAfterTopK ? " after_top_k" : "");
  if (spec_.normalize_top_k) text += " normalize";
  if (spec_.scaling_factor != 1.0) text += fmt::format(" scale={}", spec_.scaling_factor);
  if (spec_.logit_bias) text += " logit_bias";
  if (spec_.expert_bias) text += " bias";
  if (spec_.num_groups > 1)
    text += fmt::format(" groups={}/{}", spec_.top_groups, spec_.num_groups);
  if (spec_.force_balanced) text += " force_balanced";
  if (spec_.replay) text += " replay";
  if (spec_.padding) text += " padding";
  if (spec_.balance_group_size > 1) {
    text += fmt::format(" balance_group={}", spec_.balance_group_size);
  }
  return text + fmt::format(" balance={}", scope_name(spec_.balance_scope));
}

std::vector<ValueType> Router::infer(std::span<const ValueType> inputs) const {
  const int64_t num_experts = spec_.num_experts;
  const OperandSet<Input> operands = input_set();
  check_shape(*this, std::ssize(inputs) == operands.size(), "takes {} inputs, got {}",
              operands.size(), inputs.size());
  const ValueType& x = inputs[kX];
  check_shape(*this, is_storage(x.dtype) && x.shape.rank() == 2 && !x.ragged(),
              "x must be f32 or bf16 [T, H], got {}", x.to_string());
  const auto check_f32 = [&](Input input, std::string_view what, const Shape& shape) {
    if (!operands.has(input)) return;
    const ValueType& type = inputs[operands.position(input)];
    check_shape(*this, type == f32(shape), "{} must be f32 {}, got {}", what, shape.to_string(),
                type.to_string());
  };
  check_f32(kWeight, "weight", {num_experts, x.shape[1]});
  check_f32(kBias, "bias", {num_experts});
  check_f32(kExpertBias, "expert_bias", {num_experts});
  if (operands.has(kCuSeqlens)) {
    const ValueType& cu_seqlens = inputs[operands.position(kCuSeqlens)];
    check_shape(
        *this,
        cu_seqlens.dtype == DType::kI32 && cu_seqlens.shape.rank() == 1 && cu_seqlens.shape[0] >= 1,
        "cu_seqlens must be i32 [num_seqs + 1], got {}", cu_seqlens.to_string());
  }
  const int64_t num_tokens = x.shape[0];
  const Shape shape_TK{num_tokens, spec_.top_k};
  if (operands.has(kReplayed)) {
    const ValueType& replayed = inputs[operands.position(kReplayed)];
    check_shape(*this, replayed.dtype == DType::kI32 && replayed.shape == shape_TK,
                "replayed must be i32 {}, got {}", shape_TK.to_string(), replayed.to_string());
  }
  if (operands.has(kSegments)) {
    const ValueType& segments = inputs[operands.position(kSegments)];
    check_shape(*this, segments.dtype == DType::kI32 && segments.shape == Shape{num_tokens},
                "segments must be i32 [{}], got {}", num_tokens, segments.to_string());
  }
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
  cost.flops = product_flops(inputs[kX], spec_.num_experts);
  return cost;
}

void Router::differentiate(GradientBuilder& builder) const {
  using Backward = RouterBackward;
  const auto grad_probs = builder.grad_output(kProbs);
  const auto grad_balance = builder.grad_output(kBalanceLoss);
  const auto grad_z = builder.grad_output(kZLoss);
  const auto grad_means = builder.grad_output(kScoreMeans);
  const auto grad_logits = builder.grad_output(kLogits);
  if (!grad_probs && !grad_balance && !grad_z && !grad_means && !grad_logits) return;
  const RouterGradients gradients{.probs = grad_probs.has_value(),
                                  .balance_loss = grad_balance.has_value(),
                                  .z_loss = grad_z.has_value(),
                                  .score_means = grad_means.has_value(),
                                  .logits = grad_logits.has_value(),
                                  .x = builder.needs_grad(kX),
                                  .weight = builder.needs_grad(kWeight)};
  const auto backward = std::make_shared<Backward>(spec_, gradients);
  const OperandSet<Backward::Input> operands = backward->input_set();
  std::vector<ValueId> inputs(operands.size());
  const auto set = [&](Backward::Input input, ValueId id) {
    inputs[operands.position(input)] = id;
  };
  set(Backward::kX, builder.input(kX));
  set(Backward::kWeight, builder.input(kWeight));
  set(Backward::kLogits, builder.output(kLogits));
  set(Backward::kExpertIdx, builder.output(kExpertIdx));
  if (operands.has(Backward::kCounts)) set(Backward::kCounts, builder.output(kCounts));
  if (operands.has(Backward::kCuSeqlens))
    set(Backward::kCuSeqlens, builder.input(input_set().position(kCuSeqlens)));
  if (grad_probs) set(Backward::kGradProbs, *grad_probs);
  if (grad_balance) set(Backward::kGradBalanceLoss, *grad_balance);
  if (grad_z) set(Backward::kGradZLoss, *grad_z);
  if (grad_means) set(Backward::kGradScoreMeans, *grad_means);
  if (grad_logits) set(Backward::kGradLogits, *grad_logits);
  std::vector<int> accumulators;
  if (gradients.weight) accumulators.push_back(kWeight);
  if (backward->makes_grad_bias()) accumulators.push_back(input_set().position(kBias));
  const auto outputs = builder.emit(backward, inputs, accumulators);
  if (gradients.x) builder.set_grad_input(kX, outputs[Backward::kGradX]);
}

OperandSet<RouterBackward::Input> RouterBackward::input_set() const {
  const BalanceScope scope = spec_.balance_scope;
  const bool balance = gradients_.balance_loss;
  return OperandSet<Input>{kX, kWeight, kLogits, kExpertIdx}
      .add(kCounts, balance && scope != BalanceScope::kSequence)
      .add(kCuSeqlens, balance && scope == BalanceScope::kSequence)
      .add(kGradProbs, gradients_.probs)
      .add(kGradBalanceLoss, balance)
      .add(kGradZLoss, gradients_.z_loss)
      .add(kGradScoreMeans, gradients_.score_means)
      .add(kGradLogits, gradients_.logits)
      .add(kAddend, gradients_.addend);
}

std::vector<ValueType> RouterBackward::infer(std::span<const ValueType> inputs) const {
  const OperandSet<Input> operands = input_set();
  check_shape(*this, std::ssize(inputs) == operands.size(), "takes {} inputs, got {}",
              operands.size(), inputs.size());
  if (gradients_.addend) check_addend(*this, inputs[operands.position(kAddend)], inputs[kX]);
  std::vector<ValueType> outputs;
  if (gradients_.x) outputs.push_back(inputs[kX]);
  if (gradients_.weight) outputs.push_back(inputs[kWeight]);
  if (makes_grad_bias()) outputs.push_back(f32({spec_.num_experts}));
  return outputs;
}

Cost RouterBackward::cost(std::span<const ValueType> inputs,
                          std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  const int products = (gradients_.x ? 1 : 0) + (gradients_.weight ? 1 : 0);
  cost.flops = products * product_flops(inputs[kX], spec_.num_experts);
  return cost;
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
