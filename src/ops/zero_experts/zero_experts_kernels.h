#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/dtype.h"

namespace tessera::cuda {

/// Tokens [tokens, width] and their choices [tokens, top_k]; experts from num_experts on compute
/// nothing.
struct ZeroExpertRows {
  DType dtype;
  int64_t tokens;
  int64_t width;
  int top_k;
  int num_experts;
  const void* x;
  const float* probs;
  const int32_t* expert_idx;
};
void launch_zero_experts(const ZeroExpertRows& call, void* y, int32_t* routed_idx,
                         cudaStream_t stream);
void launch_zero_experts_backward(const ZeroExpertRows& call, const void* grad, void* grad_x,
                                  float* grad_probs, cudaStream_t stream);

}  // namespace tessera::cuda
