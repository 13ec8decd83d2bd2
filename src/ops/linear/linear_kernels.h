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

}  // namespace tessera::cuda
