#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ops/gemm/words.h"

/// Operands of F32 products as vector registers want them. An operand is a matrix [lines, depth],
/// where a line is a row of A or a column of B and depth is the summed dim. A panel is some lines:
/// of each element of the depth, `kWidth` places in memory, for as many lines at most.
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

/// Lines cut into panels of `step` lines each, the last of what is left.
struct PanelCut {
  int64_t num_lines = 0;
  int64_t step = 1;

  int64_t num_panels() const { return (num_lines + step - 1) / step; }
  int64_t first_line(int64_t panel) const { return panel * step; }
  int64_t lines_of(int64_t panel) const { return std::min(step, num_lines - first_line(panel)); }
};

/// Panels of lines whose neighbours are neighbours in memory. All panels take an element of the
/// depth before any takes the next, so that memory is read in runs.
template <int64_t kWidth>
void pack_by_depth(const Lines& lines, const PanelCut& cut, int64_t depth, float* to) {
  const int64_t num_panels = cut.num_panels();
  for (int64_t k = 0; k < depth; ++k) {
    const float* from = lines.data + k * lines.stride;
    for (int64_t panel = 0; panel < num_panels; ++panel) {
      float* own = to + (panel * depth + k) * kWidth;
      const int64_t first = cut.first_line(panel);
      if (first + kWidth <= cut.num_lines) {
        std::memcpy(own, from + first, kWidth * sizeof(float));
      } else {
        std::copy_n(from + first, cut.lines_of(panel), own);
      }
    }
  }
}

/// One panel where lines are stored one behind another: transposed kLanes elements at a time, with
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

/// All panels, depth · kWidth floats apart. In places of lines that are missing is what nobody may
/// use.
template <int64_t kWidth>
void pack_panels(const Lines& lines, const PanelCut& cut, int64_t depth, float* to) {
  if (lines.by_depth) return pack_by_depth<kWidth>(lines, cut, depth, to);
  for (int64_t panel = 0; panel < cut.num_panels(); ++panel) {
    pack_by_line<kWidth>(lines.from(cut.first_line(panel), 0), cut.lines_of(panel), depth,
                         to + panel * depth * kWidth);
  }
}

}  // namespace tessera::panel
