#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/dtype.h"
#include "ops/cuda/divider.h"

namespace tessera::cuda {

/// QuantizeTokens on a GPU, of rows of BF16 or of FP8; see ops/quantize_tokens/quantize_tokens.h.
/// Columns are a multiple of QuantizeTokens::kUnit, and x, y and scales of 16 bytes. Scales of x
/// are of multiples of kUnit columns.
struct TokenRows {
  DType dtype = DType::kBF16;         ///< of x; or kE4M3, kE5M2
  const void* x;                      ///< [R, C], or [T, C] where rows are gathered
  const float* row_scales = nullptr;  ///< of x, [R, C / columns_of_scale]
  int64_t columns_of_scale = 0;
  uint8_t* y;              ///< [C, N]
  float* scales;           ///< [num_groups, C], or by block [N / 128, C]
  const int64_t* offsets;  ///< [num_groups + 1]; null: all rows are one group
  int64_t num_rows;
  int64_t num_columns;
  int num_groups;
  bool by_block;
  const int32_t* source = nullptr;  ///< [num_rows] of gathered rows: t·K + k, or -1; else null
  Divider top_k = {};               ///< K
};
void launch_quantize_tokens(const TokenRows& rows, cudaStream_t stream);

}  // namespace tessera::cuda
