#pragma once

#include "core/dtype.h"
#include "ops/cuda/rows.h"

namespace tessera::cuda {

/// sum = a + b, rows of `width` elements.
struct AddRows {
  DType dtype;
  RowCount rows;
  int64_t width;
  const void* a;
  const void* b;
  void* sum;
};
void launch_add(const AddRows& call, cudaStream_t stream);

}  // namespace tessera::cuda
