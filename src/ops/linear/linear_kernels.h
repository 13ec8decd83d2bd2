#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/dtype.h"

namespace tessera::cuda {

/// out = products + bias, rounded once. products F32 [num_rows, num_columns] may be out.
void launch_add_bias(const float* products, const float* bias, void* out, DType dtype,
                     int64_t num_rows, int64_t num_columns, cudaStream_t stream);

/// offsets = {0, *extent}: the rows as those of a single expert.
void launch_row_range(const int64_t* extent, int64_t* offsets, cudaStream_t stream);

/// y = x · weightᵀ + addend (null: zero) of a single row, BF16: weight [columns, width]. REQUIRES
/// rows of whole vectors of 16 bytes and an even number of columns.
struct OneLinearRow {
  int64_t num_columns;
  int64_t width;
  const void* x;
  const void* weight;
  const void* addend;
  void* y;
};
void launch_one_linear_row(const OneLinearRow& row, cudaStream_t stream);

}  // namespace tessera::cuda
