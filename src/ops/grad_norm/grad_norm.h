#pragma once

#include "ops/operator.h"

namespace tessera {

/// Sums of squares of flat F32 tensors: (x_0 F32 [n_0], ..., x_N-1 F32 [n_N-1]) -> F64 [N]. Squares
/// and sums are taken in double, each in an order that depends on its tensor's size alone. A NaN or
/// infinity in x makes its sum NaN or infinite; finite values never overflow it.
class SumOfSquares final : public Operator {
 public:
  static constexpr std::string_view kName = "sum_of_squares";
  /// Elements whose sum is one partial result; the partial results are added from first to last.
  static constexpr int64_t kChunk = 16384;

  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  /// Scratch memory that both back ends' kernels need: a partial result for each chunk.
  static int64_t workspace_bytes(std::span<const ValueType> inputs);
};

OperatorPtr make_sum_of_squares();

void add_grad_norm_cpu(KernelTable& table);
void add_grad_norm_cuda(KernelTable& table);

}  // namespace tessera
