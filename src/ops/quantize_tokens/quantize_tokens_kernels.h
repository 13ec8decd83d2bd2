#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tessera::cuda {

/// QuantizeTokens on a GPU, of BF16 rows; see ops/quantize_tokens/quantize_tokens.h. Columns are a
/// multiple of QuantizeTokens::kUnit, and x, y and scales of 16 bytes.
struct TokenRows {
  const void* x;           ///< [R, C]
  uint8_t* y;              ///< [C, N]
  float* scales;           ///< [num_groups, C], or by block [N / 128, C]
  const int64_t* offsets;  ///< [num_groups + 1]; null: all rows are one group
  int64_t num_rows;
  int64_t num_columns;
  int num_groups;
  bool by_block;
};
void launch_quantize_tokens(const TokenRows& rows, cudaStream_t stream);

}  // namespace tessera::cuda
