#include "ops/expert_activation/expert_activation.h"

#include <algorithm>

namespace tessera {
namespace {

void check_probs(const Operator& op, const ValueType& probs_R, int64_t num_rows) {
  check_shape(op, probs_R.dtype == DType::kF32 && probs_R.shape == Shape{num_rows},
              "probs_R must be f32 [{}], got {}", num_rows, probs_R.to_string());
}

}  // namespace

ExpertActivation::ExpertActivation(const ExpertActivationSpec& spec)
    : kind_(spec.kind),
      sizes_(spec.expert_sizes, "expert_activation"),
      apply_prob_(spec.apply_prob) {}

std::string ExpertActivation::attributes() const {
  return fmt::format("{} experts={}{}", activation_name(kind_), sizes_.to_string(),
                     apply_prob_ ? " apply_prob" : "");
}

std::vector<ValueType> ExpertActivation::infer(std::span<const ValueType> inputs) const {
  const size_t expected = apply_prob_ ? 3 : 2;
  check_shape(*this, inputs.size() == expected, "takes {} inputs, got {}", expected, inputs.size());
  const ValueType& pre = inputs[0];
  const ValueType& offsets = inputs.back();
  check_shape(*this,
              (pre.dtype == DType::kF32 || pre.dtype == DType::kBF16) && pre.shape.rank() == 2 &&
                  pre.shape[1] == pre_width(),
              "pre must be f32 or bf16 [R, {}], got {}", pre_width(), pre.to_string());
  if (apply_prob_) check_probs(*this, inputs[1], pre.shape[0]);
  check_shape(*this,
              offsets.dtype == DType::kI64 && offsets.shape == Shape{sizes_.num_experts() + 1},
              "offsets must be i64 [{}], got {}", sizes_.num_experts() + 1, offsets.to_string());
  return {with_last_dim(pre, sizes_.largest())};
}

void ExpertActivation::differentiate(GradientBuilder& builder) const {
  std::vector<ValueId> inputs{*builder.grad_output(0)};
  for (int i = 0; i < (apply_prob_ ? 3 : 2); ++i) inputs.push_back(builder.input(i));
  const auto grads = builder.emit(std::make_shared<ExpertActivationBackward>(*this), inputs);
  if (builder.needs_grad(0)) builder.set_grad_input(0, grads[0]);
  if (apply_prob_ && builder.needs_grad(1)) builder.set_grad_input(1, grads[1]);
}

std::string ExpertActivationBackward::attributes() const {
  return forward_.attributes() + (gives_act_ ? " gives_act" : "");
}

std::vector<ValueType> ExpertActivationBackward::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, !inputs.empty(), "takes the gradient and the forward inputs");
  const ValueType act = forward_.infer(inputs.subspan(1))[0];
  check_shape(*this, inputs[0].dtype == act.dtype && inputs[0].shape == act.shape,
              "the gradient must be {}, got {}", act.to_string(), inputs[0].to_string());
  std::vector<ValueType> results{inputs[1]};
  if (forward_.apply_prob()) results.push_back(inputs[2]);
  if (gives_act_) results.push_back(act);
  return results;
}

OperatorPtr ExpertActivationBackward::giving_also(std::span<const ValueId> inputs,
                                                  const Operator& other,
                                                  std::span<const ValueId> other_inputs) const {
  const auto* activation = dynamic_cast<const ExpertActivation*>(&other);
  const bool is_own = activation != nullptr && activation->attributes() == forward_.attributes() &&
                      std::ranges::equal(inputs.subspan(1), other_inputs);
  if (gives_act_ || !is_own) return nullptr;
  return std::make_shared<ExpertActivationBackward>(forward_, true);
}

OperatorPtr make_expert_activation(const ExpertActivationSpec& spec) {
  return std::make_shared<ExpertActivation>(spec);
}

}  // namespace tessera
