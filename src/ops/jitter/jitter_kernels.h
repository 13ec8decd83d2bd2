#pragma once

#include "core/dtype.h"
#include "ops/cuda/rows.h"

namespace tessera::cuda {

/// y = x times the factors of Jitter, rows of `width` elements.
struct JitteredRows {
  DType dtype;
  RowCount rows;
  int64_t width;
  const int64_t* token_numbers;
  const int32_t* noise;
  const void* x;
  void* y;
};
void launch_jitter(const JitteredRows& call, cudaStream_t stream);

}  // namespace tessera::cuda
