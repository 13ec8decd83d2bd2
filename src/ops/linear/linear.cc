#include "ops/linear/linear.h"

#include <algorithm>

#include "ops/storage.h"

namespace tessera {
namespace {

void check_rows(const Operator& op, const ValueType& x, std::string_view what) {
  check_shape(op, is_factor(x.dtype) && x.shape.rank() == 2 && x.ragged_dim <= 0,
              "{} must be f32, bf16 or f16 [T, features], got {}", what, x.to_string());
}

/// Rows of a product of these rows.
ValueType product_rows(const ValueType& x, int64_t num_features) {
  return with_dtype(with_last_dim(x, num_features), product_dtype(x.dtype));
}

void check_weight(const Operator& op, const ValueType& weight, const ValueType& x) {
  check_shape(op, weight.dtype == x.dtype && weight.shape.rank() == 2 && !weight.ragged(),
              "the weight must be {} [out, in] as the rows are, got {}", dtype_name(x.dtype),
              weight.to_string());
}

/// The bytes of all operands, and 2·m·n·k.
Cost product_cost(const Cost& operands, const Shape& rows, int64_t other_features) {
  const auto macs = static_cast<double>(rows.num_elements()) * static_cast<double>(other_features);
  return {.flops = 2.0 * macs, .bytes = operands.bytes};
}

}  // namespace

std::string Linear::attributes() const {
  switch (extra_) {
    case Extra::kNone:
      return "";
    case Extra::kBias:
      return "bias";
    case Extra::kAddend:
      return "addend";
  }
  throw InternalError("linear: unknown extra input");
}

std::vector<ValueType> Linear::infer(std::span<const ValueType> inputs) const {
  const size_t expected = extra_ == Extra::kNone ? 2 : 3;
  check_shape(*this, inputs.size() == expected, "takes {} inputs, got {}", expected, inputs.size());
  const ValueType& x = inputs[kX];
  const ValueType& weight = inputs[kWeight];
  check_rows(*this, x, "x");
  check_weight(*this, weight, x);
  check_shape(*this, weight.shape[1] == x.shape[1], "x {} has {} features, the weight {} takes {}",
              x.to_string(), x.shape[1], weight.to_string(), weight.shape[1]);
  if (extra_ == Extra::kBias) {
    check_shape(*this,
                inputs[kBias].dtype == DType::kF32 && inputs[kBias].shape == Shape{weight.shape[0]},
                "the bias must be f32 [{}], got {}", weight.shape[0], inputs[kBias].to_string());
  }
  const ValueType y = product_rows(x, weight.shape[0]);
  if (extra_ == Extra::kAddend) check_addend(*this, inputs[kAddend], y);
  return {y};
}

OperatorPtr Linear::with_addend(std::span<const ValueType> inputs) const {
  if (extra_ != Extra::kNone || inputs[kX].ragged()) return nullptr;
  return std::make_shared<Linear>(Extra::kAddend);
}

Cost Linear::cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const {
  return product_cost(Operator::cost(inputs, outputs), inputs[kX].shape, outputs[kY].shape[1]);
}

void Linear::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kY);
  if (!grad) return;
  if (extra_ == Extra::kAddend && builder.needs_grad(kAddend))
    builder.set_grad_input(kAddend, *grad);
  if (builder.needs_grad(kX)) {
    const auto dgrad = std::make_shared<LinearDgrad>();
    builder.set_grad_input(
        kX, builder.emit(dgrad, {*grad, builder.input(kWeight)})[LinearDgrad::kGradX]);
  }
  if (builder.needs_grad(kWeight)) {
    builder.emit(std::make_shared<LinearWgrad>(), {builder.input(kX), *grad}, {kWeight});
  }
  if (extra_ == Extra::kBias && builder.needs_grad(kBias)) {
    builder.emit(std::make_shared<LinearBiasGrad>(), {*grad}, {kBias});
  }
}

std::vector<ValueType> LinearDgrad::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == (addend_ ? 3 : 2),
              "takes gradient and weight{}, got {} inputs", addend_ ? " and addend" : "",
              inputs.size());
  const ValueType& grad = inputs[kGrad];
  const ValueType& weight = inputs[kWeight];
  check_rows(*this, grad, "the gradient");
  check_weight(*this, weight, grad);
  check_shape(*this, weight.shape[0] == grad.shape[1],
              "the gradient {} has {} features, the weight {} gives {}", grad.to_string(),
              grad.shape[1], weight.to_string(), weight.shape[0]);
  const ValueType grad_x = product_rows(grad, weight.shape[1]);
  if (addend_) check_addend(*this, inputs[kAddend], grad_x);
  return {grad_x};
}

OperatorPtr LinearDgrad::with_addend(std::span<const ValueType> inputs) const {
  if (addend_ || inputs[kGrad].ragged()) return nullptr;
  return std::make_shared<LinearDgrad>(true);
}

Cost LinearDgrad::cost(std::span<const ValueType> inputs,
                       std::span<const ValueType> outputs) const {
  return product_cost(Operator::cost(inputs, outputs), inputs[kGrad].shape,
                      outputs[kGradX].shape[1]);
}

std::vector<ValueType> LinearWgrad::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2, "takes x and gradient, got {} inputs", inputs.size());
  const ValueType& x = inputs[kX];
  const ValueType& grad = inputs[kGrad];
  check_rows(*this, x, "x");
  check_rows(*this, grad, "the gradient");
  check_shape(*this,
              x.dtype == grad.dtype && x.shape[0] == grad.shape[0] && x.extent == grad.extent,
              "x {} and the gradient {} differ in type or rows", x.to_string(), grad.to_string());
  return {{.dtype = DType::kF32, .shape = {grad.shape[1], x.shape[1]}}};
}

Cost LinearWgrad::cost(std::span<const ValueType> inputs,
                       std::span<const ValueType> outputs) const {
  return product_cost(Operator::cost(inputs, outputs), inputs[kX].shape,
                      outputs[kGradWeight].shape[0]);
}

std::vector<ValueType> LinearBiasGrad::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes the gradient, got {} inputs", inputs.size());
  check_rows(*this, inputs[kGrad], "the gradient");
  check_shape(*this, is_storage(inputs[kGrad].dtype), "sums no columns of {}",
              inputs[kGrad].to_string());
  return {{.dtype = DType::kF32, .shape = {inputs[kGrad].shape[1]}}};
}

OperatorPtr make_linear(bool bias) {
  return std::make_shared<Linear>(bias ? Linear::Extra::kBias : Linear::Extra::kNone);
}

}  // namespace tessera
