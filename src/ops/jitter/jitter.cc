#include "ops/jitter/jitter.h"

#include "ops/storage.h"

namespace tessera {

std::vector<ValueType> Jitter::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 3, "takes x, token numbers and noise, got {} inputs",
              inputs.size());
  const ValueType& x = inputs[kX];
  check_shape(*this, is_storage(x.dtype) && x.shape.rank() == 2 && !x.ragged(),
              "x must be f32 or bf16 [T, H], got {}", x.to_string());
  const ValueType numbers{.dtype = DType::kI64, .shape = {x.shape[0]}};
  check_shape(*this, inputs[kTokenNumbers] == numbers, "token numbers must be {}, got {}",
              numbers.to_string(), inputs[kTokenNumbers].to_string());
  const ValueType noise{.dtype = DType::kI32, .shape = {kNumNoiseWords}};
  check_shape(*this, inputs[kNoise] == noise, "the noise must be {}, got {}", noise.to_string(),
              inputs[kNoise].to_string());
  return {x};
}

Cost Jitter::cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = static_cast<double>(outputs[kY].shape.num_elements());
  return cost;
}

void Jitter::differentiate(GradientBuilder& builder) const {
  const auto grad = builder.grad_output(kY);
  if (!grad || !builder.needs_grad(kX)) return;
  builder.set_grad_input(kX, builder.emit(make_jitter(), {*grad, builder.input(kTokenNumbers),
                                                          builder.input(kNoise)})[0]);
}

OperatorPtr make_jitter() {
  return std::make_shared<Jitter>();
}

}  // namespace tessera
