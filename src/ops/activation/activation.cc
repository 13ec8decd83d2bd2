#include "ops/activation/activation.h"

#include "ops/scaled_rows.h"

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
  return {output_type(*this, function_.kind, inputs[kX])};
}

void ActivationOp::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kY);
  if (!grad || !builder.needs_grad(kX)) return;
  const auto backward = std::make_shared<ActivationBackward>(function_);
  builder.set_grad_input(
      kX, builder.emit(backward, {builder.input(kX), *grad})[ActivationBackward::kGradX]);
}

std::string ActivationBackward::attributes() const {
  return fmt::format("{}{}", to_string(function_),
                     x_format_ == RowFormat::kScaled ? " scaled_x" : "");
}

std::vector<ValueType> ActivationBackward::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2, "takes x and gradient, got {} inputs", inputs.size());
  const bool is_scaled = x_format_ == RowFormat::kScaled;
  const ValueType x =
      is_scaled ? values_of_scaled_rows(*this, inputs[kX], inputs[kGrad].dtype) : inputs[kX];
  const ValueType expected = output_type(*this, function_.kind, x);
  check_shape(*this, inputs[kGrad] == expected, "the gradient must be {}, got {}",
              expected.to_string(), inputs[kGrad].to_string());
  return {x};
}

OperatorPtr ActivationBackward::reading_scaled_rows(int input) const {
  if (input != kX) return nullptr;
  return std::make_shared<ActivationBackward>(function_, RowFormat::kScaled);
}

OperatorPtr make_activation(const ActivationFunction& function) {
  return std::make_shared<ActivationOp>(function);
}

}  // namespace tessera
