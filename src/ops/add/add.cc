#include "ops/add/add.h"

namespace tessera {

std::vector<ValueType> Add::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2, "takes two inputs, got {}", inputs.size());
  check_shape(*this, inputs[0] == inputs[1], "operands differ: {} and {}", inputs[0].to_string(),
              inputs[1].to_string());
  check_shape(*this, inputs[0].dtype == DType::kF32 || inputs[0].dtype == DType::kBF16,
              "operands are {}, expected f32 or bf16", dtype_name(inputs[0].dtype));
  return {inputs[0]};
}

Cost Add::cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = static_cast<double>(outputs[0].shape.num_elements());
  return cost;
}

void Add::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(0);
  if (!grad) return;
  for (int operand = 0; operand < 2; ++operand) {
    if (builder.needs_grad(operand)) builder.set_grad_input(operand, *grad);
  }
}

OperatorPtr make_add() {
  return std::make_shared<Add>();
}

}  // namespace tessera
