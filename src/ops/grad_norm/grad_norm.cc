#include "ops/grad_norm/grad_norm.h"

#include <algorithm>
#include <cmath>

namespace tessera {

std::vector<ValueType> SumOfSquares::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, !inputs.empty(), "takes at least 1 input, got none");
  for (const ValueType& x : inputs) {
    check_shape(*this, is_storage(x.dtype) && x.shape.rank() == 1 && !x.ragged(),
                "x must be f32 or bf16 [n], got {}", x.to_string());
  }
  return {{.dtype = DType::kF64, .shape = {std::ssize(inputs)}}};
}

Cost SumOfSquares::cost(std::span<const ValueType> inputs,
                        std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  for (const ValueType& x : inputs) cost.flops += 2.0 * static_cast<double>(x.shape.num_elements());
  return cost;
}

int64_t SumOfSquares::workspace_bytes(std::span<const ValueType> inputs) {
  int64_t num_chunks = 0;
  for (const ValueType& x : inputs) num_chunks += (x.shape.num_elements() + kChunk - 1) / kChunk;
  return num_chunks * dtype_size(DType::kF64);
}

std::vector<ValueType> GradClip::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() >= kFirstLoss,
              "takes at least 2 inputs (sums, limits, losses), got {}", inputs.size());
  const ValueType& sums = inputs[kSums];
  check_shape(*this, sums.dtype == DType::kF64 && sums.shape.rank() == 1 && !sums.ragged(),
              "sums must be f64 [n], got {}", sums.to_string());
  const ValueType pair = {.dtype = DType::kF64, .shape = {2}};
  check_shape(*this, inputs[kLimits] == pair, "limits must be f64 [2], got {}",
              inputs[kLimits].to_string());
  for (const ValueType& loss : inputs.subspan(kFirstLoss)) {
    check_shape(*this, loss == ValueType{.dtype = DType::kF32, .shape = {1}},
                "losses must be f32 [1], got {}", loss.to_string());
  }
  return {pair, with_dtype(pair, DType::kF32)};
}

double norm_of(double sum_of_squares, double grad_scale) {
  return std::sqrt(sum_of_squares) * std::abs(grad_scale);
}

double clip_factor(double norm, double max_norm) {
  return max_norm > 0.0 ? std::min(1.0, max_norm / (norm + 1e-6)) : 1.0;
}

OperatorPtr make_grad_clip() {
  return std::make_shared<GradClip>();
}

OperatorPtr make_sum_of_squares() {
  return std::make_shared<SumOfSquares>();
}

}  // namespace tessera
