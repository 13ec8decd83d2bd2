#include "ops/sigmoid_gate/sigmoid_gate.h"

namespace tessera {
namespace {

void check_factors(const Operator& op, const ValueType& y, const ValueType& factors) {
  check_shape(op, y.shape.rank() == 2 && is_storage(y.dtype), "y must be f32 or bf16 [T,H], got {}",
              y.to_string());
  check_shape(op,
              factors.dtype == DType::kF32 && factors.shape == Shape{y.shape[0]} &&
                  factors.ragged() == y.ragged(),
              "factors are {}, expected f32 [{}], one for each row of y {}", factors.to_string(),
              y.shape[0], y.to_string());
}

void check_gate(const Operator& op, const GateSpec& spec, const ValueType& y,
                const ValueType& logit) {
  if (spec.function == GateFunction::kIdentity) return check_factors(op, y, logit);
  check_shape(op, y.shape.rank() == 2 && logit.shape.rank() == 2,
              "takes y [T,H] and logit [T,G], got {} and {}", y.to_string(), logit.to_string());
  const bool fits = logit.shape[1] > 0 && y.shape[1] % logit.shape[1] == 0;
  check_shape(op, logit.shape[0] == y.shape[0] && fits && logit.dtype == y.dtype,
              "logit is {}, expected one per row, head or element of y {}", logit.to_string(),
              y.to_string());
  check_shape(op, is_storage(y.dtype), "y is {}, expected f32 or bf16", dtype_name(y.dtype));
}

std::string attributes_of(const GateSpec& spec) {
  if (spec.function == GateFunction::kIdentity) return "identity";
  const char* const function = spec.function == GateFunction::kSoftplus ? "softplus" : "";
  if (!spec.of_heads) return function;
  return *function == '\0' ? "heads" : "softplus, heads";
}

}  // namespace

std::string SigmoidGate::attributes() const {
  return attributes_of(spec_);
}

std::string SigmoidGateBackward::attributes() const {
  return attributes_of(spec_);
}

std::vector<ValueType> SigmoidGate::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2, "takes two inputs, got {}", inputs.size());
  check_gate(*this, spec_, inputs[kX], inputs[kLogit]);
  return {inputs[kX]};
}

void SigmoidGate::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kY);
  if (!grad) return;
  const auto grads = builder.emit(std::make_shared<SigmoidGateBackward>(spec_),
                                  {builder.input(kX), builder.input(kLogit), *grad});
  for (int idx = 0; idx < 2; ++idx) {
    if (builder.needs_grad(idx)) builder.set_grad_input(idx, grads[idx]);
  }
}

std::vector<ValueType> SigmoidGateBackward::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 3, "takes three inputs, got {}", inputs.size());
  check_gate(*this, spec_, inputs[kX], inputs[kLogit]);
  check_shape(*this, inputs[kGrad] == inputs[kX], "the gradient is {}, expected {}",
              inputs[kGrad].to_string(), inputs[kX].to_string());
  return {inputs[kX], inputs[kLogit]};
}

OperatorPtr make_sigmoid_gate(GateSpec spec) {
  return std::make_shared<SigmoidGate>(spec);
}

}  // namespace tessera
