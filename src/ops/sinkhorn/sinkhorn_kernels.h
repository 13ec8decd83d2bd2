#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tessera::cuda {

constexpr int kSinkhornMaxExperts = 1024;

/// As SinkhornWorkspace has them.
struct SinkhornCall {
  int64_t num_tokens;
  int num_experts;
  int top_k;
  int64_t first_own;
  int64_t own_tokens;
  const float* logits_TE;
  const int32_t* noise;
  float* scores_TE;
  double* factors_E;
  double* partials;
  int32_t* done;
  int32_t* expert_idx;
};
void launch_sinkhorn(const SinkhornCall& call, cudaStream_t stream);

}  // namespace tessera::cuda
