#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/dtype.h"

namespace tessera::cuda {

/// Quantize on a GPU; see ops/quantize/quantize.h. Rows beyond `extent`, where it is not null, are
/// left as they are.
struct QuantizedRows {
  DType dtype;    ///< of x
  DType element;  ///< of y
  const void* x;
  void* y;
  float* scales;
  int64_t num_rows;
  int64_t num_columns;
  int64_t block_rows;
  int64_t block_columns;
  float smallest_amax;
  const int64_t* extent;
};
void launch_quantize(const QuantizedRows& rows, cudaStream_t stream);

}  // namespace tessera::cuda
