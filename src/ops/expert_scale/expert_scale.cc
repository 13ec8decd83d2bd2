#include "ops/expert_scale/expert_scale.h"

namespace tessera {
namespace {

void check_operands(const Operator& op, std::span<const ValueType> inputs) {
  const ValueType& idx = inputs[ExpertScale::kExpertIdx];
  check_shape(op, idx.dtype == DType::kI32 && idx.shape.rank() == 2 && !idx.ragged(),
              "expert_idx must be i32 [T, K], got {}", idx.to_string());
  const ValueType& probs = inputs[ExpertScale::kProbs];
  check_shape(op, probs == with_dtype(idx, DType::kF32), "probs must be f32 {}, got {}",
              idx.shape.to_string(), probs.to_string());
  const ValueType& scale = inputs[ExpertScale::kScale];
  check_shape(op, scale.dtype == DType::kF32 && scale.shape.rank() == 1 && !scale.ragged(),
              "scale must be f32 [E], got {}", scale.to_string());
}

}  // namespace

std::vector<ValueType> ExpertScale::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 3, "takes probs, expert_idx and scale, got {} inputs",
              inputs.size());
  check_operands(*this, inputs);
  return {inputs[kProbs]};
}

void ExpertScale::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kScaled);
  if (!grad) return;
  const auto grads = builder.emit(
      std::make_shared<ExpertScaleBackward>(),
      {builder.input(kProbs), builder.input(kExpertIdx), builder.input(kScale), *grad}, {kScale});
  if (builder.needs_grad(kProbs))
    builder.set_grad_input(kProbs, grads[ExpertScaleBackward::kGradProbs]);
}

std::vector<ValueType> ExpertScaleBackward::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 4,
              "takes probs, expert_idx, scale and a gradient, got {} inputs", inputs.size());
  check_operands(*this, inputs);
  check_shape(*this, inputs[kGrad] == inputs[kProbs], "the gradient must be {}, got {}",
              inputs[kProbs].to_string(), inputs[kGrad].to_string());
  return {inputs[kProbs], inputs[kScale]};
}

OperatorPtr make_expert_scale() {
  return std::make_shared<ExpertScale>();
}

}  // namespace tessera
