#pragma once

#include "ops/operator.h"

namespace tessera {

/// Sums of squares of flat tensors, each F32 or BF16: (x_0 [n_0], ..., x_N-1 [n_N-1]) -> F64 [N].
/// Squares and sums are taken in double, each in an order that depends on its tensor's size alone.
/// A NaN or infinity in x makes its sum NaN or infinite; finite values never overflow it.
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

/// Global gradient-norm clipping as torch.nn.utils.clip_grad_norm_, and what an optimizer makes of
/// it:
///   norm = sqrt(Σ sums) · |grad_scale|, summed in order; NaN where a loss is NaN or infinite
///   clip = min(1, max_norm / (norm + 1e-6)); 1 where max_norm is 0 or the norm is not finite
/// (sums F64 [N], limits F64 [2] = {grad_scale, max_norm}, losses F32 [1] ...)
///   -> norm F64 [2] = {norm, clip}, grad_scale F32 [2] = {grad_scale · clip, found_inf}
/// where found_inf is 1 where the norm is not finite, otherwise 0. The same bits in every back end.
class GradClip final : public Operator {
 public:
  static constexpr std::string_view kName = "grad_clip";
  enum Input : int { kSums, kLimits, kFirstLoss };
  enum Output : int { kNorm, kGradScale };

  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  bool recomputable() const override { return false; }
};

/// GradClip's norm, where all losses are finite, and its clip factor, where the norm is.
double norm_of(double sum_of_squares, double grad_scale);
double clip_factor(double norm, double max_norm);

OperatorPtr make_sum_of_squares();
OperatorPtr make_grad_clip();

void add_grad_norm_cpu(KernelTable& table);
void add_grad_norm_cuda(KernelTable& table);

}  // namespace tessera
