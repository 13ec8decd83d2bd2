#pragma once

#include "core/dtype.h"
#include "ops/cuda/rows.h"

namespace tessera::cuda {

/// y = a · b, rows of `width` elements.
struct MultiplyRows {
  DType dtype;
  RowCount rows;
  int64_t width;
  const void* a;
  const void* b;
  void* y;
};
void launch_multiply(const MultiplyRows& call, cudaStream_t stream);

}  // namespace tessera::cuda
