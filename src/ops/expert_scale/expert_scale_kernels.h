#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tessera::cuda {

/// The choices of all tokens, `count` of them, among `num_experts`.
struct ExpertChoices {
  int64_t count;
  int num_experts;
  const float* probs;
  const int32_t* expert_idx;
  const float* scale;
};
void launch_expert_scale(const ExpertChoices& call, float* scaled, cudaStream_t stream);
/// `grad_scale` is added to, unless it is null.
void launch_expert_scale_backward(const ExpertChoices& call, const float* grad, float* grad_probs,
                                  float* grad_scale, cudaStream_t stream);

}  // namespace tessera::cuda
