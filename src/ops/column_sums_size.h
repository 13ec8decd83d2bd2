#pragma once

#include <cstdint>

namespace tessera {

/// Sums over rows, for the gradients of norm weights and biases. Rows are cut into at most
/// kColumnSumChunks chunks by their number alone; each chunk is summed in order and the chunks are
/// added in order, so that the bits do not depend on the number of threads.
inline constexpr int64_t kColumnSumChunks = 64;
inline constexpr int64_t kMinRowsOfChunk = 16;

/// Scratch memory for sums of `cols` columns, in bytes.
constexpr int64_t column_sums_bytes(int64_t cols) {
  return kColumnSumChunks * cols * static_cast<int64_t>(sizeof(float));
}

}  // namespace tessera
