#include "ops/top_p/top_p.h"

#include <cmath>

namespace tessera {
namespace {

void check_choices(const Operator& op, const ValueType& probs, const ValueType& idx) {
  check_shape(op, probs.dtype == DType::kF32 && probs.shape.rank() == 2 && !probs.ragged(),
              "probs must be f32 [T, K], got {}", probs.to_string());
  check_shape(op, idx.dtype == DType::kI32 && idx.shape == probs.shape,
              "expert_idx must be i32 {}, got {}", probs.shape.to_string(), idx.to_string());
}

}  // namespace

TopP::TopP(const TopPSpec& spec) : spec_(spec) {
  require(spec.num_experts >= 1, "top_p: num_experts is {}, expected at least 1", spec.num_experts);
  require(spec.share > 0, "top_p: the share is {}, expected more than 0", spec.share);
  require(std::isfinite(spec.scaling_factor), "top_p: the scaling factor is {}",
          spec.scaling_factor);
}

std::string TopP::attributes() const {
  return fmt::format(
      "p={}{}{}", spec_.share, spec_.normalize ? " normalize" : "",
      spec_.scaling_factor == 1.0 ? "" : fmt::format(" scale={}", spec_.scaling_factor));
}

std::vector<ValueType> TopP::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2, "takes probs and expert_idx, got {} inputs",
              inputs.size());
  check_choices(*this, inputs[kProbs], inputs[kExpertIdx]);
  return {inputs[kProbs], inputs[kExpertIdx], {DType::kF32, {spec_.num_experts}}};
}

void TopP::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kKeptProbs);
  if (!grad || !builder.needs_grad(kProbs)) return;
  const auto backward = std::make_shared<TopPBackward>(spec_);
  builder.set_grad_input(
      kProbs, builder.emit(backward, {builder.input(kProbs), builder.output(kKeptIdx), *grad})[0]);
}

std::vector<ValueType> TopPBackward::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 3, "takes probs, kept_idx and a gradient, got {} inputs",
              inputs.size());
  check_choices(*this, inputs[kProbs], inputs[kKeptIdx]);
  check_shape(*this, inputs[kGrad] == inputs[kProbs], "the gradient is {}, expected {}",
              inputs[kGrad].to_string(), inputs[kProbs].to_string());
  return {inputs[kProbs]};
}

OperatorPtr make_top_p(const TopPSpec& spec) {
  return std::make_shared<TopP>(spec);
}

}  // namespace tessera
