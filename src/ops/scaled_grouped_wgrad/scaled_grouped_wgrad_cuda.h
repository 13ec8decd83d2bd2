#pragma once

#include "ops/grouped_matmul/grouped_matmul_cuda.h"

namespace tessera::cuda {

/// grad [Σ g_e, H] F32 += (or =) narrow_e · wide_eᵀ of FP8 codes along tokens with scales: narrow
/// E4M3 [max g_e, N], wide E4M3 [H, N]; H, which is `experts.wide`, and max g_e are multiples of
/// QuantizeTokens::kUnit. `num_tokens` bounds offsets[E]. See ScaledGroupedWgrad.
struct ScaledWgrad {
  ExpertBlocks experts;
  bool by_block = false;  ///< scales of 128 tokens, else of an expert's
  int64_t num_tokens = 0;
  const void* narrow = nullptr;
  const float* narrow_scales = nullptr;
  const void* wide = nullptr;
  const float* wide_scales = nullptr;
  float* grad = nullptr;
  bool accumulate = true;
  int* counter = nullptr;  ///< as in GroupedRows
};
void scaled_wgrad(const ScaledWgrad& product, cudaStream_t stream);

}  // namespace tessera::cuda
