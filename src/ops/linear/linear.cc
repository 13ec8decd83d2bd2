#include "ops/linear/linear.h"

#include <algorithm>

#include "ops/column_sums_size.h"
#include "ops/storage.h"

namespace tessera {
namespace {

void check_rows(const Operator& op, const ValueType& x, std::string_view what) {
  check_shape(op, is_storage(x.dtype) && x.shape.rank() == 2 && x.ragged_dim <= 0,
              "{} must be f32 or bf16 [T, features], got {}", what, x.to_string());
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

/// F32 rows of `columns` for what a BF16 product is added to.
int64_t tile_bytes(const ValueType& rows, int64_t columns) {
  if (rows.dtype == DType::kF32) return 0;
  return std::min(rows.shape[0], kLinearTileRows) * columns * dtype_size(DType::kF32);
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
  const ValueType& x = inputs[0];
  const ValueType& weight = inputs[1];
  check_rows(*this, x, "x");
  check_weight(*this, weight, x);
  check_shape(*this, weight.shape[1] == x.shape[1], "x {} has {} features, the weight {} takes {}",
              x.to_string(), x.shape[1], weight.to_string(), weight.shape[1]);
  if (extra_ == Extra::kBias) {
    check_shape(*this, inputs[2].dtype == DType::kF32 && inputs[2].shape == Shape{weight.shape[0]},
                "the bias must be f32 [{}], got {}", weight.shape[0], inputs[2].to_string());
  }
  const ValueType y = with_last_dim(x, weight.shape[0]);
  if (extra_ == Extra::kAddend) check_addend(*this, inputs[2], y);
  return {y};
}

OperatorPtr Linear::with_addend(std::span<const ValueType> inputs) const {
  if (extra_ != Extra::kNone || inputs[0].ragged()) return nullptr;
  return std::make_shared<Linear>(Extra::kAddend);
}

Cost Linear::cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const {
  return product_cost(Operator::cost(inputs, outputs), inputs[0].shape, outputs[0].shape[1]);
}

int64_t Linear::cpu_workspace_bytes(std::span<const ValueType> inputs) const {
  return extra_ == Extra::kNone ? 0 : tile_bytes(inputs[0], inputs[1].shape[0]);
}

void Linear::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(0);
  if (!grad) return;
  if (extra_ == Extra::kAddend && builder.needs_grad(2)) builder.set_grad_input(2, *grad);
  if (builder.needs_grad(0)) {
    const auto dgrad = std::make_shared<LinearDgrad>();
    builder.set_grad_input(0, builder.emit(dgrad, {*grad, builder.input(1)})[0]);
  }
  if (builder.needs_grad(1)) {
    builder.emit(std::make_shared<LinearWgrad>(), {builder.input(0), *grad}, {1});
  }
  if (extra_ == Extra::kBias && builder.needs_grad(2)) {
    builder.emit(std::make_shared<LinearBiasGrad>(), {*grad}, {2});
  }
}

std::vector<ValueType> LinearDgrad::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == (addend_ ? 3 : 2),
              "takes gradient and weight{}, got {} inputs", addend_ ? " and addend" : "",
              inputs.size());
  const ValueType& grad = inputs[0];
  const ValueType& weight = inputs[1];
  check_rows(*this, grad, "the gradient");
  check_weight(*this, weight, grad);
  check_shape(*this, weight.shape[0] == grad.shape[1],
              "the gradient {} has {} features, the weight {} gives {}", grad.to_string(),
              grad.shape[1], weight.to_string(), weight.shape[0]);
  const ValueType grad_x = with_last_dim(grad, weight.shape[1]);
  if (addend_) check_addend(*this, inputs[2], grad_x);
  return {grad_x};
}

int64_t LinearDgrad::cpu_workspace_bytes(std::span<const ValueType> inputs) const {
  return addend_ ? tile_bytes(inputs[0], inputs[1].shape[1]) : 0;
}

OperatorPtr LinearDgrad::with_addend(std::span<const ValueType> inputs) const {
  if (addend_ || inputs[0].ragged()) return nullptr;
  return std::make_shared<LinearDgrad>(true);
}

Cost LinearDgrad::cost(std::span<const ValueType> inputs,
                       std::span<const ValueType> outputs) const {
  return product_cost(Operator::cost(inputs, outputs), inputs[0].shape, outputs[0].shape[1]);
}

std::vector<ValueType> LinearWgrad::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2, "takes x and gradient, got {} inputs", inputs.size());
  const ValueType& x = inputs[0];
  const ValueType& grad = inputs[1];
  check_rows(*this, x, "x");
  check_rows(*this, grad, "the gradient");
  check_shape(*this,
              x.dtype == grad.dtype && x.shape[0] == grad.shape[0] && x.extent == grad.extent,
              "x {} and the gradient {} differ in type or rows", x.to_string(), grad.to_string());
  return {{.dtype = DType::kF32, .shape = {grad.shape[1], x.shape[1]}}};
}

Cost LinearWgrad::cost(std::span<const ValueType> inputs,
                       std::span<const ValueType> outputs) const {
  return product_cost(Operator::cost(inputs, outputs), inputs[0].shape, outputs[0].shape[0]);
}

std::vector<ValueType> LinearBiasGrad::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes the gradient, got {} inputs", inputs.size());
  check_rows(*this, inputs[0], "the gradient");
  return {{.dtype = DType::kF32, .shape = {inputs[0].shape[1]}}};
}

int64_t LinearBiasGrad::cpu_workspace_bytes(std::span<const ValueType> inputs) const {
  return column_sums_bytes(inputs[0].shape[1]);
}

OperatorPtr make_linear(bool bias) {
  return std::make_shared<Linear>(bias ? Linear::Extra::kBias : Linear::Extra::kNone);
}

}  // namespace tessera
