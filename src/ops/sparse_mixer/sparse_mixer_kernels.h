#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/sparse_mixer/sparse_mixer_token.h"

namespace tessera::cuda {

struct SparseMixerTokens {
  SparseMixerToken rule;
  int64_t tokens;
  const float* logits;
  const int32_t* expert_idx;
};
void launch_sparse_mixer(const SparseMixerTokens& call, float* probs, cudaStream_t stream);

/// What training draws from, and where it goes.
struct SparseMixerDraw {
  const int64_t* token_numbers;
  const int32_t* noise;
  float* probs;
  int32_t* drawn_idx;
  float* counts_E;  ///< set to 0 first
};
void launch_sparse_mixer_draw(const SparseMixerTokens& call, const SparseMixerDraw& draw,
                              cudaStream_t stream);
void launch_sparse_mixer_backward(const SparseMixerTokens& call, const float* grad,
                                  float* grad_logits, cudaStream_t stream);

}  // namespace tessera::cuda
