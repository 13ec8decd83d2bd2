#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/dtype.h"
#include "ops/cuda/rows.h"

namespace tessera::cuda {

/// Dequantize on a GPU; see ops/dequantize/dequantize.h. Rows beyond those in use are left as they
/// are.
struct CodedRows {
  DType element;  ///< of x: kE4M3 or kE5M2
  DType dtype;    ///< of y
  const uint8_t* x;
  const float* scales;
  void* y;
  RowCount rows;
  int64_t num_columns;
  int64_t columns_of_scale;
  int64_t rows_of_scale = 1;
};
void launch_dequantize(const CodedRows& coded, cudaStream_t stream);

}  // namespace tessera::cuda
