#pragma once

#include "ops/grouped_matmul/grouped_matmul_cuda.h"

namespace tessera::cuda {

/// y = a · W_eᵀ of FP8 values with scales: a E4M3 [R, K], the weight E4M3 [Σ g_e, K], y BF16
/// [R, max g_e]; `experts.wide` is K, a multiple of 16, and the largest g_e a multiple of 8. R
/// bounds offsets[E]. See ScaledGroupedMatmul.
struct ScaledRows {
  ExpertBlocks experts;
  bool by_block = false;  ///< scales of 1 × 128 and 128 × 128, else of rows
  int64_t num_rows = 0;
  const void* a = nullptr;
  const float* a_scales = nullptr;
  const void* weight = nullptr;
  const float* weight_scales = nullptr;
  void* y = nullptr;
  int* counter = nullptr;  ///< as in GroupedRows
};
void scaled_rows(const ScaledRows& product, cudaStream_t stream);

}  // namespace tessera::cuda
