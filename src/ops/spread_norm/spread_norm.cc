#include "ops/spread_norm/spread_norm.h"

#include "ops/column_sums_size.h"
#include "ops/storage.h"

namespace tessera {
namespace {

void check_rows(const Operator& op, const ValueType& x) {
  check_shape(op, is_storage(x.dtype) && x.shape.rank() == 2 && !x.ragged(),
              "x must be f32 or bf16 [T, n], got {}", x.to_string());
}

/// One F32 for each row.
ValueType sums_type(const ValueType& x) {
  return {DType::kF32, {x.shape[0]}};
}

void check_operands(const Operator& op, std::span<const ValueType> inputs, size_t count) {
  check_shape(op, inputs.size() == count, "takes {} inputs, got {}", count, inputs.size());
  const ValueType& x = inputs[0];
  check_rows(op, x);
  const ValueType weight{DType::kF32, {x.shape[1]}};
  check_shape(op, inputs[1] == weight, "the weight must be {}, got {}", weight.to_string(),
              inputs[1].to_string());
  check_shape(op, inputs[2] == sums_type(x), "the square sums must be {}, got {}",
              sums_type(x).to_string(), inputs[2].to_string());
}

}  // namespace

std::vector<ValueType> SquareSums::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes x, got {} inputs", inputs.size());
  check_rows(*this, inputs[0]);
  return {sums_type(inputs[0])};
}

void SquareSums::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(0);
  if (!grad || !builder.needs_grad(0)) return;
  builder.set_grad_input(
      0, builder.emit(std::make_shared<SquareSumsBackward>(), {builder.input(0), *grad})[0]);
}

std::vector<ValueType> SquareSumsBackward::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2, "takes x and gradient, got {} inputs", inputs.size());
  check_rows(*this, inputs[0]);
  check_shape(*this, inputs[1] == sums_type(inputs[0]), "the gradient must be {}, got {}",
              sums_type(inputs[0]).to_string(), inputs[1].to_string());
  return {inputs[0]};
}

SpreadNorm::SpreadNorm(const SpreadNormSpec& spec) : spec_(spec) {
  require(spec.num_elements >= 1 && spec.eps >= 0,
          "spread_norm: {} elements and eps {}; expected at least 1, and at least 0",
          spec.num_elements, spec.eps);
}

std::string SpreadNorm::attributes() const {
  return fmt::format("elements={} eps={}", spec_.num_elements, spec_.eps);
}

std::vector<ValueType> SpreadNorm::infer(std::span<const ValueType> inputs) const {
  check_operands(*this, inputs, 3);
  return {inputs[0]};
}

void SpreadNorm::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(0);
  if (!grad) return;
  const auto grads =
      builder.emit(std::make_shared<SpreadNormBackward>(spec_),
                   {builder.input(0), builder.input(1), builder.input(2), *grad}, {1});
  if (builder.needs_grad(0)) builder.set_grad_input(0, grads[0]);
  if (builder.needs_grad(2)) builder.set_grad_input(2, grads[1]);
}

std::vector<ValueType> SpreadNormBackward::infer(std::span<const ValueType> inputs) const {
  check_operands(*this, inputs, 4);
  check_shape(*this, inputs[3] == inputs[0], "the gradient must be {} as x is, got {}",
              inputs[0].to_string(), inputs[3].to_string());
  return {inputs[0], inputs[2], inputs[1]};
}

int64_t SpreadNormBackward::cpu_workspace_bytes(std::span<const ValueType> inputs) const {
  return column_sums_bytes(inputs[1].shape[0]);
}

OperatorPtr make_square_sums() {
  return std::make_shared<SquareSums>();
}

OperatorPtr make_spread_norm(const SpreadNormSpec& spec) {
  return std::make_shared<SpreadNorm>(spec);
}

}  // namespace tessera
