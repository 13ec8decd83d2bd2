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
  const auto dims = x.shape.dims().first(static_cast<size_t>(x.shape.rank() - 1));
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
  check_operands(*this, inputs[0], inputs[1]);
  return {inputs[0], statistics_type(inputs[0], inputs[1])};
}

void RmsNorm::differentiate(GradientBuilder& builder) const {
  ensure(!builder.grad_output(1), "rmsnorm: rstd is a statistic and takes no gradient");
  const auto grad = builder.grad_output(0);
  if (!grad) return;
  const auto grads =
      builder.emit(std::make_shared<RmsNormBackward>(),
                   {builder.input(0), builder.input(1), builder.output(1), *grad}, {1});
  if (builder.needs_grad(0)) builder.set_grad_input(0, grads[0]);
}

std::vector<ValueType> RmsNormBackward::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == (addend_ ? 5 : 4),
              "takes x, weight, rstd{} gradient{}, got {} inputs", addend_ ? "," : " and",
              addend_ ? " and addend" : "", inputs.size());
  check_operands(*this, inputs[0], inputs[1]);
  check_shape(*this, inputs[2] == statistics_type(inputs[0], inputs[1]), "rstd must be {}, got {}",
              statistics_type(inputs[0], inputs[1]).to_string(), inputs[2].to_string());
  check_shape(*this, inputs[3] == inputs[0], "the gradient must be {} as x is, got {}",
              inputs[0].to_string(), inputs[3].to_string());
  if (addend_) check_addend(*this, inputs[4], inputs[0]);
  return {inputs[0], inputs[1]};
}

OperatorPtr RmsNormBackward::with_addend(std::span<const ValueType> /*inputs*/) const {
  return addend_ ? nullptr : std::make_shared<RmsNormBackward>(true);
}

int64_t RmsNormBackward::cpu_workspace_bytes(std::span<const ValueType> inputs) const {
  return column_sums_bytes(inputs[1].shape[0]);
}

OperatorPtr make_rmsnorm(double eps) {
  return std::make_shared<RmsNorm>(eps);
}

}  // namespace tessera
