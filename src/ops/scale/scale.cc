#include "ops/scale/scale.h"

#include <cmath>

#include "ops/storage.h"

namespace tessera {

Scale::Scale(double factor, bool addend) : factor_(factor), addend_(addend) {
  require(std::isfinite(factor), "scale: the factor is {}, expected a finite number", factor);
}

std::string Scale::attributes() const {
  return fmt::format("factor={}{}", factor_, addend_ ? " addend" : "");
}

std::vector<ValueType> Scale::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == (addend_ ? 2 : 1), "takes x{}, got {} inputs",
              addend_ ? " and an addend" : "", inputs.size());
  check_shape(*this, is_storage(inputs[kX].dtype), "x is {}, expected f32 or bf16",
              dtype_name(inputs[kX].dtype));
  if (addend_) check_addend(*this, inputs[kAddend], inputs[kX]);
  return {inputs[kX]};
}

OperatorPtr Scale::with_addend(std::span<const ValueType> /*inputs*/) const {
  if (addend_) return nullptr;
  return std::make_shared<Scale>(factor_, true);
}

Cost Scale::cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = (addend_ ? 2.0 : 1.0) * static_cast<double>(outputs[kY].shape.num_elements());
  return cost;
}

void Scale::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kY);
  if (!grad) return;
  if (addend_ && builder.needs_grad(kAddend)) builder.set_grad_input(kAddend, *grad);
  if (!builder.needs_grad(kX)) return;
  builder.set_grad_input(kX, builder.emit(make_scale(factor_), {*grad})[0]);
}

OperatorPtr make_scale(double factor) {
  return std::make_shared<Scale>(factor);
}

}  // namespace tessera
