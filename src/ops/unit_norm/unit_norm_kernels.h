#pragma once

#include "core/dtype.h"
#include "ops/cuda/rows.h"

namespace tessera::cuda {

/// Heads of `size` elements one behind the other; `rows` counts heads.
struct UnitNormRows {
  DType dtype;
  RowCount rows;
  int64_t size;
  float eps;
  const void* x;
};
void launch_unit_norm(const UnitNormRows& call, void* y, cudaStream_t stream);
void launch_unit_norm_backward(const UnitNormRows& call, const void* grad, void* grad_x,
                               cudaStream_t stream);

}  // namespace tessera::cuda
