#include "ops/multiply/multiply.h"

#include "ops/storage.h"

namespace tessera {

std::vector<ValueType> Multiply::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 2, "takes two inputs, got {}", inputs.size());
  check_shape(*this, inputs[kA] == inputs[kB], "operands differ: {} and {}", inputs[kA].to_string(),
              inputs[kB].to_string());
  check_shape(*this, is_storage(inputs[kA].dtype), "operands are {}, expected f32 or bf16",
              dtype_name(inputs[kA].dtype));
  return {inputs[kA]};
}

Cost Multiply::cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = static_cast<double>(outputs[kY].shape.num_elements());
  return cost;
}

void Multiply::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kY);
  if (!grad) return;
  for (const int operand : {kA, kB}) {
    if (!builder.needs_grad(operand)) continue;
    const ValueId other = builder.input(operand == kA ? kB : kA);
    builder.set_grad_input(operand, builder.emit(make_multiply(), {*grad, other})[0]);
  }
}

OperatorPtr make_multiply() {
  return std::make_shared<Multiply>();
}

}  // namespace tessera
