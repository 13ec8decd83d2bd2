#pragma once

#include "core/dtype.h"
#include "ops/cuda/rows.h"

namespace tessera::cuda {

/// y = cap · tanh(x / cap), rows of `width` elements; y may be x.
struct SoftcapRows {
  DType dtype;
  RowCount rows;
  int64_t width;
  float cap;
  const void* x;
  void* y;
};
void launch_softcap(const SoftcapRows& call, cudaStream_t stream);

}  // namespace tessera::cuda
