#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/top_p/top_p_token.h"

namespace tessera::cuda {

struct TopPTokens {
  TopPToken rule;
  int64_t tokens;
  int num_experts;
  const float* probs;
  const int32_t* expert_idx;
};
/// counts_E are set to 0 first.
void launch_top_p(const TopPTokens& call, float* kept_probs, int32_t* kept_idx, float* counts_E,
                  cudaStream_t stream);
/// expert_idx are those that were kept.
void launch_top_p_backward(const TopPTokens& call, const float* grad, float* grad_probs,
                           cudaStream_t stream);

}  // namespace tessera::cuda
