#include "ops/rmsnorm/rmsnorm.h"

#include "ops/column_sums_size.h"
#include "ops/storage.h"

namespace tessera {
namespace {

void check_operands(const Operator& op, const ValueType& x, const ValueType& weight) {
  check_shape(op, is_storage(x.dtype) && x.shape.rank() >= 2,
              "x must be f32 or bf16 of at least two dims, got {}", x.to_string());
  check_shape(op, x.ragged_dim != x.shape.rank() - 1,
              "the last dim of x must not be ragged, got {}", x.to_string());
  check_shape(op,
              weight.dtype == DType::kF32 && weight.shape.rank() == 1 && weight.shape[0] > 0 &&
                  x.shape.last() % weight.shape[0] == 0,
              "the weight must be f32 [{}], or of a divisor's size, got {}", x.shape.last(),
              weight.to_string());
}

/// One F32 for each head of a row.
ValueType statistics_type(ValueType x, const ValueType& weight) {
  const int64_t heads = x.shape.last() / weight.shape[0];
  const auto dims = x.shape.dims().first(x.shape.rank() - 1);
  std::vector<int64_t> kept(dims.begin(), dims.end());
  if (heads != 1) kept.push_back(heads);
  x.dtype = DType::kF32;
  x.shape = Shape(kept);
  return x;
}

}  // namespace

RmsNorm::RmsNorm(double eps) : eps_(eps) {
  require(eps >= 0, "rmsnorm: eps must be at least 0, got {}", eps);
}

std::string RmsNorm::attributes() const {
  return fmt::format("eps={}", eps_);
}

std::vector<ValueType> RmsNorm::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2, "takes x and weight, got {} inputs", inputs.size());
  check_operands(*this, inputs[kX], inputs[kWeight]);
  return {inputs[kX], statistics_type(inputs[kX], inputs[kWeight])};
}

void RmsNorm::differentiate(GradientBuilder& builder) const {
  ensure(!builder.grad_output(kRstd), "rmsnorm: rstd is a statistic and takes no gradient");
  const auto grad = builder.grad_output(kY);
  if (!grad) return;
  const auto grads = builder.emit(
      std::make_shared<RmsNormBackward>(),
      {builder.input(kX), builder.input(kWeight), builder.output(kRstd), *grad}, {kWeight});
  if (builder.needs_grad(kX)) builder.set_grad_input(kX, grads[RmsNormBackward::kGradX]);
}

std::vector<ValueType> RmsNormBackward::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == (addend_ ? 5 : 4),
              "takes x, weight, rstd{} gradient{}, got {} inputs", addend_ ? "," : " and",
              addend_ ? " and addend" : "", inputs.size());
  check_operands(*this, inputs[kX], inputs[kWeight]);
  check_shape(*this, inputs[kForwardRstd] == statistics_type(inputs[kX], inputs[kWeight]),
              "rstd must be {}, got {}", statistics_type(inputs[kX], inputs[kWeight]).to_string(),
              inputs[kForwardRstd].to_string());
  check_shape(*this, inputs[kGrad] == inputs[kX], "the gradient must be {} as x is, got {}",
              inputs[kX].to_string(), inputs[kGrad].to_string());
  if (addend_) check_addend(*this, inputs[kAddend], inputs[kX]);
  return {inputs[kX], inputs[kWeight]};
}

OperatorPtr RmsNormBackward::with_addend(std::span<const ValueType> /*inputs*/) const {
  return addend_ ? nullptr : std::make_shared<RmsNormBackward>(true);
}

OperatorPtr make_rmsnorm(double eps) {
  return std::make_shared<RmsNorm>(eps);
}

}  // namespace tessera
