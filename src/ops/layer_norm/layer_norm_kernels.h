#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "ops/cuda/column_sums.h"
#include "ops/cuda/rows.h"

namespace tessera::cuda {

/// Rows of `size` elements.
struct LayerNormRows {
  DType dtype;
  RowCount rows;
  int64_t size;
  float eps;
  const void* x;
  const float* weight;
};
void launch_layer_norm(const LayerNormRows& call, const float* bias, void* y, cudaStream_t stream);

/// Of their gradients: x's, plus the addend unless it is null, and those of weight and bias, added
/// up unless they are null.
struct LayerNormGradients {
  const void* grad;
  const void* addend;
  void* grad_x;
  Accumulator grad_weight;
  Accumulator grad_bias;
  std::byte* scratch;  ///< layer_norm_statistics_bytes of the rows, then column_sums_bytes
  int num_sms;
};
void launch_layer_norm_backward(const LayerNormRows& call, const LayerNormGradients& gradients,
                                cudaStream_t stream);
int64_t layer_norm_statistics_bytes(int64_t rows);

}  // namespace tessera::cuda
