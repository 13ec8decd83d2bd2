#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ops/gemm/words.h"

/// Operands of F32 products as vector registers want them. An operand is a matrix [lines, depth],
/// where a line is a row of A or a column of B and depth is the summed dim.
namespace tessera::panel {

using simd::kLanes;

/// Element (line, k) at data[line · stride + k], or at data[k · stride + line] for `by_depth`.
struct Lines {
  const float* data = nullptr;
  int64_t stride = 0;
  bool by_depth = false;

  Lines from(int64_t line, int64_t k) const {
    return {data + (by_depth ? k * stride + line : line * stride + k), stride, by_depth};
  }
};

/// to[k · kWidth + line] = up to kWidth neighbouring lines over `depth`. Places of lines that are
/// missing are left alone, or get what nobody may use.
template <int64_t kWidth>
void pack_by_depth(const Lines& lines, int64_t num_lines, int64_t depth, float* to) {
  for (int64_t k = 0; k < depth; ++k, to += kWidth) {
    const float* from = lines.data + k * lines.stride;
    if (num_lines == kWidth) {
      std::memcpy(to, from, kWidth * sizeof(float));
    } else {
      std::copy_n(from, num_lines, to);
    }
  }
}

/// The same where lines are stored one behind another: transposed kLanes elements at a time, with
/// the last line in place of missing ones.
template <int64_t kWidth>
void pack_by_line(const Lines& lines, int64_t num_lines, int64_t depth, float* to) {
  for (int64_t first = 0; first < num_lines; first += kLanes) {
    const int64_t last = std::min<int64_t>(num_lines - first, kLanes) - 1;
    const float* own = lines.data + first * lines.stride;
    int64_t k = 0;
    for (; k + kLanes <= depth; k += kLanes) {
      tile::transpose(
          [&](int64_t i) {
            const float* row = own + std::min(i, last) * lines.stride + k;
            return tile::load_words(reinterpret_cast<const tile::Word*>(row));
          },
          reinterpret_cast<tile::Word*>(to + k * kWidth + first), kWidth);
    }
    for (; k < depth; ++k) {
      for (int64_t i = 0; i <= last; ++i) to[k * kWidth + first + i] = own[i * lines.stride + k];
    }
  }
}

template <int64_t kWidth>
void pack_panel(const Lines& lines, int64_t num_lines, int64_t depth, float* to) {
  if (lines.by_depth) {
    pack_by_depth<kWidth>(lines, num_lines, depth, to);
  } else {
    pack_by_line<kWidth>(lines, num_lines, depth, to);
  }
}

}  // namespace tessera::panel
