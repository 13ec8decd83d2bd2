#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/dtype.h"

namespace tessera::cuda {

/// See MixStreams: `hidden` elements of each of `streams` streams of `tokens` tokens.
struct MixCall {
  DType dtype;
  int64_t tokens;
  int64_t streams;
  int64_t hidden;
  const void* x;
  const void* given;
  const float* post;
  const float* comb;
};
void launch_mix_streams(const MixCall& call, void* y, cudaStream_t stream);

struct MixGrads {
  const void* grad;
  void* x;
  void* given;
  float* post;
  float* comb;
};
void launch_mix_streams_backward(const MixCall& call, const MixGrads& grads, cudaStream_t stream);

}  // namespace tessera::cuda
