#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/dtype.h"

namespace tessera::cuda {

/// o [T, N·Dv] and lse [N, T] of attention, and the sinks [N] of its heads.
struct SinkRows {
  DType dtype;
  int64_t num_tokens;
  int num_heads;
  int head_size;  ///< Dv
  const void* o;
  const float* lse;
  const float* sinks;
};

/// y [T, N·Dv] = o · sigmoid(lse - sink).
void launch_attention_sink(const SinkRows& rows, void* y, cudaStream_t stream);

struct SinkGrads {
  const void* grad;  ///< of y
  void* grad_o;
  float* grad_lse;    ///< [N, T]
  float* grad_sinks;  ///< [N], which are added to; null: not wanted
};
void launch_attention_sink_backward(const SinkRows& rows, const SinkGrads& grads,
                                    cudaStream_t stream);

}  // namespace tessera::cuda
