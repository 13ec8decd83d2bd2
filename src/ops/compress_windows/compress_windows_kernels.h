#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "core/dtype.h"
#include "ops/cuda/column_sums.h"

namespace tessera::cuda {

/// See CompressWindows.
struct CompressRows {
  DType dtype;
  int64_t num_tokens;
  int64_t width;  ///< S·D
  int64_t size;   ///< D
  int64_t num_rows;
  int rate;
  bool overlaps;
  const void* kv;
  const void* gate;
  const float* bias;
  const int32_t* positions;
};
void launch_compress_windows(const CompressRows& call, void* entries, int32_t* entry_positions,
                             cudaStream_t stream);

/// Parts that the tokens are cut into, by their number and that of the bias's elements alone: each
/// has sums of its own for the gradient of the bias.
constexpr int64_t compress_parts(int64_t num_tokens, int64_t bias_elements) {
  constexpr int64_t kMostParts = 256;
  constexpr int64_t kLeastTokens = 32;
  constexpr int64_t kMostElements = int64_t{8} << 20;
  return std::max<int64_t>(std::min({(num_tokens + kLeastTokens - 1) / kLeastTokens, kMostParts,
                                     kMostElements / std::max<int64_t>(bias_elements, 1)}),
                           1);
}

struct CompressGrads {
  const void* entries;
  void* kv;
  void* gate;
  Accumulator bias;  ///< no sums: it is not wanted
  float* partials;   ///< [compress_parts, m, S·D]
};
void launch_compress_windows_backward(const CompressRows& call, const CompressGrads& grads,
                                      cudaStream_t stream);

}  // namespace tessera::cuda
