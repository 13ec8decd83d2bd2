#include "ops/layer_norm/layer_norm.h"

#include "ops/storage.h"

namespace tessera {
namespace {

void check_rows(const Operator& op, const ValueType& x) {
  check_shape(op, is_storage(x.dtype) && x.shape.rank() == 2 && x.ragged_dim <= 0,
              "x must be f32 or bf16 [T, D], got {}", x.to_string());
}

ValueType vector_of(const ValueType& x) {
  return {.dtype = DType::kF32, .shape = {x.shape.last()}};
}

}  // namespace

LayerNorm::LayerNorm(double eps) : eps_(eps) {
  require(eps >= 0, "layer_norm: eps {} is negative", eps);
}

std::string LayerNorm::attributes() const {
  return fmt::format("eps={}", eps_);
}

std::vector<ValueType> LayerNorm::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 3, "takes x, weight and bias, got {} inputs", inputs.size());
  const ValueType& x = inputs[kX];
  check_rows(*this, x);
  const ValueType vector = vector_of(x);
  check_shape(*this, inputs[kWeight] == vector && inputs[kBias] == vector,
              "weight and bias must be {}, got {} and {}", vector.to_string(),
              inputs[kWeight].to_string(), inputs[kBias].to_string());
  return {x};
}

void LayerNorm::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kY);
  if (!grad) return;
  const auto grads =
      builder.emit(std::make_shared<LayerNormBackward>(eps_),
                   {builder.input(kX), builder.input(kWeight), *grad}, {kWeight, kBias});
  if (builder.needs_grad(kX)) builder.set_grad_input(kX, grads[LayerNormBackward::kGradX]);
}

std::string LayerNormBackward::attributes() const {
  return fmt::format("eps={}{}", eps_, addend_ ? " addend" : "");
}

std::vector<ValueType> LayerNormBackward::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == (addend_ ? 4 : 3),
              "takes x, weight{} gradient{}, got {} inputs", addend_ ? "," : " and",
              addend_ ? " and addend" : "", inputs.size());
  const ValueType& x = inputs[kX];
  check_rows(*this, x);
  const ValueType vector = vector_of(x);
  check_shape(*this, inputs[kWeight] == vector, "the weight must be {}, got {}", vector.to_string(),
              inputs[kWeight].to_string());
  check_shape(*this, inputs[kGrad] == x, "the gradient must be {} as x is, got {}", x.to_string(),
              inputs[kGrad].to_string());
  if (addend_) check_addend(*this, inputs[kAddend], x);
  return {x, vector, vector};
}

OperatorPtr LayerNormBackward::with_addend(std::span<const ValueType> /*inputs*/) const {
  return addend_ ? nullptr : std::make_shared<LayerNormBackward>(eps_, true);
}

OperatorPtr make_layer_norm(double eps) {
  return std::make_shared<LayerNorm>(eps);
}

}  // namespace tessera
