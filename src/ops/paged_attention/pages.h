#pragma once

#include <cstdint>

namespace tessera {

/// Tokens of a page of keys or values.
inline constexpr int64_t kPageTokens = 128;
/// Sizes of heads that the kernels for GPUs take.
inline constexpr int64_t kMostPagedHeadSize = 640;
inline constexpr int64_t kMostPagedHeadSizeV = 512;
/// Pages of that many tokens.
inline constexpr int64_t pages_of(int64_t num_tokens) {
  return (num_tokens + kPageTokens - 1) / kPageTokens;
}

}  // namespace tessera
