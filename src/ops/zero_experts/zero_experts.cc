#include "ops/zero_experts/zero_experts.h"

#include "ops/storage.h"

namespace tessera {
namespace {

void check_operands(const Operator& op, std::span<const ValueType> inputs) {
  const ValueType& x = inputs[ZeroExperts::kX];
  check_shape(op, is_storage(x.dtype) && x.shape.rank() == 2 && !x.ragged(),
              "x must be f32 or bf16 [T, H], got {}", x.to_string());
  const ValueType& idx = inputs[ZeroExperts::kExpertIdx];
  check_shape(op, idx.dtype == DType::kI32 && idx.shape.rank() == 2 && idx.shape[0] == x.shape[0],
              "expert_idx must be i32 [{}, K], got {}", x.shape[0], idx.to_string());
  const ValueType& probs = inputs[ZeroExperts::kProbs];
  check_shape(op, probs.dtype == DType::kF32 && probs.shape == idx.shape,
              "probs must be f32 {}, got {}", idx.shape.to_string(), probs.to_string());
}

double elements(const ValueType& type) {
  return static_cast<double>(type.shape.num_elements());
}

}  // namespace

ZeroExperts::ZeroExperts(const ZeroExpertsSpec& spec) : spec_(spec) {
  require(spec.num_experts >= 1 && spec.zero_experts >= 1,
          "zero_experts: {} experts and {} that compute nothing, expected at least 1 of each",
          spec.num_experts, spec.zero_experts);
}

std::string ZeroExperts::attributes() const {
  return fmt::format("experts={} zero={}", spec_.num_experts, spec_.zero_experts);
}

std::vector<ValueType> ZeroExperts::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 3, "takes x, probs and expert_idx, got {} inputs",
              inputs.size());
  check_operands(*this, inputs);
  return {inputs[kX], inputs[kExpertIdx]};
}

Cost ZeroExperts::cost(std::span<const ValueType> inputs,
                       std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = elements(outputs[kY]);
  return cost;
}

void ZeroExperts::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kY);
  if (!grad) return;
  const auto grads =
      builder.emit(std::make_shared<ZeroExpertsBackward>(spec_),
                   {builder.input(kX), builder.input(kProbs), builder.input(kExpertIdx), *grad});
  if (builder.needs_grad(kX)) builder.set_grad_input(kX, grads[ZeroExpertsBackward::kGradX]);
  if (builder.needs_grad(kProbs))
    builder.set_grad_input(kProbs, grads[ZeroExpertsBackward::kGradProbs]);
}

std::vector<ValueType> ZeroExpertsBackward::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 4, "takes x, probs, expert_idx and a gradient, got {} inputs",
              inputs.size());
  check_operands(*this, inputs);
  check_shape(*this, inputs[kGrad] == inputs[kX], "the gradient is {}, expected {}",
              inputs[kGrad].to_string(), inputs[kX].to_string());
  return {inputs[kX], inputs[kProbs]};
}

Cost ZeroExpertsBackward::cost(std::span<const ValueType> inputs,
                               std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = 3 * elements(outputs[kGradX]);
  return cost;
}

OperatorPtr make_zero_experts(const ZeroExpertsSpec& spec) {
  return std::make_shared<ZeroExperts>(spec);
}

}  // namespace tessera
