#pragma once

#include "core/dtype.h"
#include "ops/cuda/rows.h"

namespace tessera::cuda {

/// y = factor · x + addend, rows of `width` elements.
struct ScaleRows {
  DType dtype;
  RowCount rows;
  int64_t width;
  float factor;
  const void* x;
  const void* addend;  ///< null: none
  void* y;
};
void launch_scale(const ScaleRows& call, cudaStream_t stream);

}  // namespace tessera::cuda
