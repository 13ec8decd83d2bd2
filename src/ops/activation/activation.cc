#include "ops/activation/activation.h"

#include "ops/storage.h"

namespace tessera {
namespace {

/// Checks the forward input and gives the type of the forward output.
ValueType output_type(const Operator& op, Activation kind, const ValueType& x) {
  check_shape(op, is_storage(x.dtype) && x.shape.rank() == 2 && x.ragged_dim <= 0,
              "x must be f32 or bf16 [T, features], got {}", x.to_string());
  if (!is_gated(kind)) return x;
  check_shape(op, x.shape[1] % 2 == 0, "{} splits the features in two halves, but x is {}",
              activation_name(kind), x.to_string());
  return with_last_dim(x, x.shape[1] / 2);
}

}  // namespace

std::vector<ValueType> ActivationOp::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes one input, got {}", inputs.size());
  return {output_type(*this, kind_, inputs[0])};
}

void ActivationOp::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(0);
  if (!grad || !builder.needs_grad(0)) return;
  const auto backward = std::make_shared<ActivationBackward>(kind_);
  builder.set_grad_input(0, builder.emit(backward, {builder.input(0), *grad})[0]);
}

std::vector<ValueType> ActivationBackward::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2, "takes x and gradient, got {} inputs", inputs.size());
  const ValueType expected = output_type(*this, kind_, inputs[0]);
  check_shape(*this, inputs[1] == expected, "the gradient must be {}, got {}", expected.to_string(),
              inputs[1].to_string());
  return {inputs[0]};
}

OperatorPtr make_activation(Activation kind) {
  return std::make_shared<ActivationOp>(kind);
}

}  // namespace tessera
