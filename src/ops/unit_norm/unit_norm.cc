#include "ops/unit_norm/unit_norm.h"

#include "ops/storage.h"

namespace tessera {
namespace {

std::string describe(int64_t head_size, double eps) {
  return fmt::format("head_size={} eps={}", head_size, eps);
}

void check_rows(const Operator& op, const ValueType& x, int64_t head_size) {
  check_shape(op,
              is_storage(x.dtype) && x.shape.rank() == 2 && x.ragged_dim <= 0 &&
                  x.shape.last() % head_size == 0,
              "x must be f32 or bf16 [T, heads of {}], got {}", head_size, x.to_string());
}

}  // namespace

UnitNorm::UnitNorm(int64_t head_size, double eps) : head_size_(head_size), eps_(eps) {
  require(head_size >= 1 && eps >= 0,
          "unit_norm: heads of {} and eps {}, expected at least 1 and at least 0", head_size, eps);
}

std::string UnitNorm::attributes() const {
  return describe(head_size_, eps_);
}

std::vector<ValueType> UnitNorm::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes x, got {} inputs", inputs.size());
  check_rows(*this, inputs[kX], head_size_);
  return {inputs[kX]};
}

void UnitNorm::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kY);
  if (!grad || !builder.needs_grad(kX)) return;
  builder.set_grad_input(kX, builder.emit(std::make_shared<UnitNormBackward>(head_size_, eps_),
                                          {builder.input(kX), *grad})[0]);
}

std::string UnitNormBackward::attributes() const {
  return describe(head_size_, eps_);
}

std::vector<ValueType> UnitNormBackward::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2, "takes x and a gradient, got {} inputs", inputs.size());
  check_rows(*this, inputs[kX], head_size_);
  check_shape(*this, inputs[kGrad] == inputs[kX], "the gradient must be {} as x is, got {}",
              inputs[kX].to_string(), inputs[kGrad].to_string());
  return {inputs[kX]};
}

OperatorPtr make_unit_norm(int64_t head_size, double eps) {
  return std::make_shared<UnitNorm>(head_size, eps);
}

}  // namespace tessera
