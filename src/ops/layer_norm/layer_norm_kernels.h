#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/dtype.h"
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
  const float* bias;
};
void launch_layer_norm(const LayerNormRows& call, void* y, cudaStream_t stream);

}  // namespace tessera::cuda
