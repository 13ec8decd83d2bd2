#pragma once

#include "core/dtype.h"
#include "ops/cuda/rows.h"

namespace tessera::cuda {

/// y = *factor · x, rows of `width` elements.
struct ScaledByRows {
  DType dtype;
  RowCount rows;
  int64_t width;
  const float* factor;
  const void* x;
  void* y;
};
void launch_scale_by(const ScaledByRows& call, cudaStream_t stream);

}  // namespace tessera::cuda
