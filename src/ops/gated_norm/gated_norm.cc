#include "ops/gated_norm/gated_norm.h"

#include "ops/storage.h"

namespace tessera {
namespace {

void check_gated(const Operator& op, std::span<const ValueType> inputs, size_t count) {
  check_shape(op, inputs.size() == count, "takes {} inputs, got {}", count, inputs.size());
  const ValueType& x = inputs[GatedNorm::kX];
  const ValueType& weight = inputs[GatedNorm::kWeight];
  check_shape(op, is_storage(x.dtype) && x.shape.rank() == 2 && x.ragged_dim < 0,
              "x is {}, expected f32 or bf16 [T,N·D]", x.to_string());
  check_shape(op, inputs[GatedNorm::kZ] == x, "z is {}, expected {}",
              inputs[GatedNorm::kZ].to_string(), x.to_string());
  check_shape(op,
              weight.dtype == DType::kF32 && weight.shape.rank() == 1 && weight.shape[0] > 0 &&
                  x.shape[1] % weight.shape[0] == 0,
              "the weight is {}, expected f32 of a head's size, which divides {}",
              weight.to_string(), x.shape[1]);
}

std::string describe(double eps, NormGate gate) {
  return fmt::format("eps={}{}", eps, gate == NormGate::kSigmoid ? " gate=sigmoid" : "");
}

}  // namespace

GatedNorm::GatedNorm(double eps, NormGate gate) : eps_(eps), gate_(gate) {
  require(eps >= 0, "gated_norm: eps must be at least 0, got {}", eps);
}

std::string GatedNorm::attributes() const {
  return describe(eps_, gate_);
}

std::vector<ValueType> GatedNorm::infer(std::span<const ValueType> inputs) const {
  check_gated(*this, inputs, 3);
  return {inputs[kX]};
}

void GatedNorm::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kY);
  if (!grad) return;
  const auto grads = builder.emit(
      std::make_shared<GatedNormBackward>(eps_, gate_),
      {builder.input(kX), builder.input(kZ), builder.input(kWeight), *grad}, {kWeight});
  if (builder.needs_grad(kX)) builder.set_grad_input(kX, grads[GatedNormBackward::kGradX]);
  if (builder.needs_grad(kZ)) builder.set_grad_input(kZ, grads[GatedNormBackward::kGradZ]);
}

std::string GatedNormBackward::attributes() const {
  return describe(eps_, gate_);
}

std::vector<ValueType> GatedNormBackward::infer(std::span<const ValueType> inputs) const {
  check_gated(*this, inputs, 4);
  check_shape(*this, inputs[kGrad] == inputs[kX], "the gradient is {}, expected {}",
              inputs[kGrad].to_string(), inputs[kX].to_string());
  return {inputs[kX], inputs[kZ], inputs[kWeight]};
}

OperatorPtr make_gated_norm(double eps, NormGate gate) {
  return std::make_shared<GatedNorm>(eps, gate);
}

}  // namespace tessera
