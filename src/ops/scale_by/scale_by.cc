#include "ops/scale_by/scale_by.h"

#include "ops/storage.h"

namespace tessera {

std::vector<ValueType> ScaleBy::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2, "takes x and a factor, got {} inputs", inputs.size());
  check_shape(*this, is_storage(inputs[kX].dtype), "x is {}, expected f32 or bf16",
              dtype_name(inputs[kX].dtype));
  const ValueType number{DType::kF32, {1}};
  check_shape(*this, inputs[kFactor] == number, "the factor must be {}, got {}", number.to_string(),
              inputs[kFactor].to_string());
  return {inputs[kX]};
}

Cost ScaleBy::cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = static_cast<double>(outputs[kY].shape.num_elements());
  return cost;
}

void ScaleBy::differentiate(GradientBuilder& builder) const {
  ensure(!builder.needs_grad(kFactor), "scale_by: the factor has no gradient");
  const auto grad = builder.grad_output(kY);
  if (!grad || !builder.needs_grad(kX)) return;
  builder.set_grad_input(kX, builder.emit(make_scale_by(), {*grad, builder.input(kFactor)})[0]);
}

OperatorPtr make_scale_by() {
  return std::make_shared<ScaleBy>();
}

}  // namespace tessera
