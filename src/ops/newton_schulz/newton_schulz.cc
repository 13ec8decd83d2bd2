#include "ops/newton_schulz/newton_schulz.h"

#include <algorithm>

#include "core/memory.h"

namespace tessera {

NewtonSchulz::NewtonSchulz(int64_t steps) : steps_(steps) {
  require(steps >= 1 && steps <= 100, "newton_schulz: steps must be from 1 to 100, got {}", steps);
}

std::vector<ValueType> NewtonSchulz::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes 1 input, got {}", inputs.size());
  const ValueType& m = inputs[kM];
  check_shape(*this, is_storage(m.dtype) && m.shape.rank() == 3 && !m.ragged(),
              "matrices must be f32 or bf16 [batch, rows, columns], got {}", m.to_string());
  return {m};
}

bool NewtonSchulz::pairs_steps(int64_t rows, int64_t cols) {
  // A pair saves 4 · rows · cols · n FLOPs and has 6 · n³ more.
  return 2 * std::max(rows, cols) > 3 * std::min(rows, cols);
}

int64_t NewtonSchulz::num_products(int64_t rows, int64_t cols) const {
  return pairs_steps(rows, cols) ? (steps_ + 1) / 2 : steps_;
}

Cost NewtonSchulz::cost(std::span<const ValueType> inputs,
                        std::span<const ValueType> outputs) const {
  Cost cost = Operator::cost(inputs, outputs);
  const Shape& shape = inputs[kM].shape;
  const auto n = static_cast<double>(std::min(shape[1], shape[2]));
  const auto elements = static_cast<double>(shape.num_elements());
  const auto batch = static_cast<double>(shape[0]);
  const auto with_x = static_cast<double>(num_products(shape[1], shape[2]));
  const double pairs = static_cast<double>(steps_) - with_x;
  const double squares = static_cast<double>(steps_) + 3 * pairs;
  cost.flops = 4 * elements * n * with_x + 2 * batch * n * n * n * squares;
  return cost;
}

NewtonSchulz::Scratch NewtonSchulz::scratch(const ValueType& batch) {
  const int64_t n = std::min(batch.shape[1], batch.shape[2]);
  const int64_t squares = batch.shape[0] * n * n;
  Scratch scratch;
  scratch.gram = align_up(batch.num_bytes());
  scratch.square = scratch.gram + align_up(squares * dtype_size(batch.dtype));
  scratch.sums = scratch.square + align_up(squares * dtype_size(DType::kF32));
  scratch.num_bytes = scratch.sums + align_up(batch.shape[0] * NewtonSchulzFactors::kSums *
                                              dtype_size(DType::kF64));
  return scratch;
}

OperatorPtr make_newton_schulz(int64_t steps) {
  return std::make_shared<NewtonSchulz>(steps);
}

}  // namespace tessera
