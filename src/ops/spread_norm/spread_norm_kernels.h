#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/dtype.h"
#include "ops/cuda/column_sums.h"

/// Norms of rows that are spread over ranks, on the GPU; see spread_norm.h.
namespace tessera::cuda {

/// Rows [T, n].
struct SpreadRows {
  DType dtype;
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

struct SpreadNormGrads {
  const void* grad;
  void* grad_x;
  float* grad_sums;
  float* partials;                ///< column_sums_bytes
  cuda::Accumulator grad_weight;  ///< without sums where it is not wanted
  int num_sms;
};
void launch_spread_norm_backward(const SpreadNormRows& norm, const SpreadNormGrads& grads,
                                 cudaStream_t stream);

}  // namespace tessera::cuda
