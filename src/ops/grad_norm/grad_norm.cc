#include "ops/grad_norm/grad_norm.h"

namespace tessera {

std::vector<ValueType> SumOfSquares::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes 1 input, got {}", inputs.size());
  const ValueType& x = inputs[0];
  check_shape(*this, x.dtype == DType::kF32 && x.shape.rank() == 1 && !x.ragged(),
              "x must be f32 [n], got {}", x.to_string());
  return {{.dtype = DType::kF64, .shape = {1}}};
}

Cost SumOfSquares::cost(std::span<const ValueType> inputs,
                        std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  cost.flops = 2.0 * static_cast<double>(inputs[0].shape.num_elements());
  return cost;
}

int64_t SumOfSquares::cpu_workspace_bytes(std::span<const ValueType> inputs) const {
  const int64_t num_chunks = (inputs[0].shape.num_elements() + kChunk - 1) / kChunk;
  return num_chunks * dtype_size(DType::kF64);
}

OperatorPtr make_sum_of_squares() {
  return std::make_shared<SumOfSquares>();
}

}  // namespace tessera
