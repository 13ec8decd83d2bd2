#include "ops/add/add.h"

namespace tessera {

std::vector<ValueType> Add::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2, "takes two inputs, got {}", inputs.size());
  check_shape(*this, inputs[kA] == inputs[kB], "operands differ: {} and {}", inputs[kA].to_string(),
              inputs[kB].to_string());
  check_shape(*this, is_storage(inputs[kA].dtype), "operands are {}, expected f32 or bf16",
              dtype_name(inputs[kA].dtype));
  return {inputs[kA]};
}

Cost Add::cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = static_cast<double>(outputs[kSum].shape.num_elements());
  return cost;
}

void Add::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kSum);
  if (!grad) return;
  for (int operand = 0; operand < 2; ++operand) {
    if (builder.needs_grad(operand)) builder.set_grad_input(operand, *grad);
  }
}

OperatorPtr make_add() {
  return std::make_shared<Add>();
}

}  // namespace tessera
