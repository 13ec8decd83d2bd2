#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/dtype.h"

namespace tessera::cuda {

/// See CollapseStreams: `hidden` elements of each of `streams` streams of `tokens` tokens.
struct CollapseCall {
  DType dtype;
  int64_t tokens;
  int64_t streams;
  int64_t hidden;
  const void* x;
  const float* pre;
};
void launch_collapse_streams(const CollapseCall& call, void* y, cudaStream_t stream);
/// `addend` may be null.
void launch_collapse_streams_backward(const CollapseCall& call, const void* grad,
                                      const void* addend, void* grad_x, float* grad_pre,
                                      cudaStream_t stream);

}  // namespace tessera::cuda
