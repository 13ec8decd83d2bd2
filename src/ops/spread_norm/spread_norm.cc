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

/// Those that the norm and its gradient have in common.
template <typename Op>
void check_operands(const Op& op, std::span<const ValueType> inputs, size_t count) {
  check_shape(op, inputs.size() == count, "takes {} inputs, got {}", count, inputs.size());
  const ValueType& x = inputs[Op::kX];
  check_rows(op, x);
  const ValueType weight{DType::kF32, {x.shape[1]}};
  check_shape(op, inputs[Op::kWeight] == weight, "the weight must be {}, got {}",
              weight.to_string(), inputs[Op::kWeight].to_string());
  check_shape(op, inputs[Op::kSquareSums] == sums_type(x), "the square sums must be {}, got {}",
              sums_type(x).to_string(), inputs[Op::kSquareSums].to_string());
}

}  // namespace

std::vector<ValueType> SquareSums::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes x, got {} inputs", inputs.size());
  check_rows(*this, inputs[kX]);
  return {sums_type(inputs[kX])};
}

void SquareSums::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kSums);
  if (!grad || !builder.needs_grad(kX)) return;
  builder.set_grad_input(0, builder.emit(std::make_shared<SquareSumsBackward>(),
                                         {builder.input(kX), *grad})[SquareSumsBackward::kGradX]);
}

std::vector<ValueType> SquareSumsBackward::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2, "takes x and gradient, got {} inputs", inputs.size());
  check_rows(*this, inputs[kX]);
  check_shape(*this, inputs[kGrad] == sums_type(inputs[kX]), "the gradient must be {}, got {}",
              sums_type(inputs[kX]).to_string(), inputs[kGrad].to_string());
  return {inputs[kX]};
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
  return {inputs[kX]};
}

void SpreadNorm::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kY);
  if (!grad) return;
  const auto grads = builder.emit(
      std::make_shared<SpreadNormBackward>(spec_),
      {builder.input(kX), builder.input(kWeight), builder.input(kSquareSums), *grad}, {kWeight});
  if (builder.needs_grad(kX)) builder.set_grad_input(kX, grads[SpreadNormBackward::kGradX]);
  if (builder.needs_grad(kSquareSums))
    builder.set_grad_input(kSquareSums, grads[SpreadNormBackward::kGradSquareSums]);
}

std::vector<ValueType> SpreadNormBackward::infer(std::span<const ValueType> inputs) const {
  check_operands(*this, inputs, 4);
  check_shape(*this, inputs[kGrad] == inputs[kX], "the gradient must be {} as x is, got {}",
              inputs[kX].to_string(), inputs[kGrad].to_string());
  return {inputs[kX], inputs[kSquareSums], inputs[kWeight]};
}

OperatorPtr make_square_sums() {
  return std::make_shared<SquareSums>();
}

OperatorPtr make_spread_norm(const SpreadNormSpec& spec) {
  return std::make_shared<SpreadNorm>(spec);
}

}  // namespace tessera
