#pragma once

#include <cuda_runtime.h>

#include <cstdint>

/// Norms of rows that are spread over ranks, on the GPU; see spread_norm.h.
namespace tessera::cuda {

/// Rows [T, n] in F32, or in BF16.
struct SpreadRows {
  bool bf16;
  int64_t num_rows;
  int64_t width;
};

void launch_square_sums(const SpreadRows& rows, const void* x, float* sums, cudaStream_t stream);
void launch_square_sums_backward(const SpreadRows& rows, const void* x, const float* grad,
                                 void* grad_x, cudaStream_t stream);

struct SpreadNormRows {
  SpreadRows rows;
  float num_elements;  ///< of a row, over all ranks
  float eps;
  const void* x;
  const float* weight;
  const float* square_sums;
};
void launch_spread_norm(const SpreadNormRows& norm, void* y, cudaStream_t stream);

/// Rows whose terms of the weight's gradient are added up together.
constexpr int kSpreadNormRun = 128;
constexpr int64_t spread_norm_runs(int64_t num_rows) {
  return (num_rows + kSpreadNormRun - 1) / kSpreadNormRun;
}
struct SpreadNormGrads {
  const void* grad;
  void* grad_x;
  float* grad_sums;
  float* partials;     ///< scratch memory [runs, n]
  float* grad_weight;  ///< added to; null: not wanted
};
void launch_spread_norm_backward(const SpreadNormRows& norm, const SpreadNormGrads& grads,
                                 cudaStream_t stream);

}  // namespace tessera::cuda
