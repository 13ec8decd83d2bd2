#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/dtype.h"

namespace tessera::cuda {

/// Masters and weights [rows, columns], changed in place; weight is null where the master is the
/// weight.
struct RowsToScale {
  const float* factors;
  DType master_type;
  void* master;
  void* weight;
  int64_t rows;
  int64_t columns;
};
void launch_scale_rows(const RowsToScale& call, cudaStream_t stream);

}  // namespace tessera::cuda
