#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/dtype.h"
#include "ops/gemm/tile_registers.h"

/// Operands of BF16 products as tile registers want them. An operand is a matrix [lines, depth],
/// where a line is a row of A or a column of B and depth is the summed dim. A register takes 16
/// lines and 32 of their elements along the depth.
namespace tessera::tile {

inline constexpr int64_t kTileDepth = 2 * kTileWords;
/// Lines of a panel: two registers.
inline constexpr int64_t kPanelLines = 2 * kTileRows;
/// Words of one step of a panel: two registers, 32 elements of the depth.
inline constexpr int64_t kPanelStep = 2 * kTileSize;

/// Element (line, k) at data[line · stride + k], or at data[k · stride + line] for `by_depth`.
struct Lines {
  const Bf16* data = nullptr;
  int64_t stride = 0;
  bool by_depth = false;

  Lines from(int64_t line, int64_t k) const {
    return {data + (by_depth ? k * stride + line : line * stride + k), stride, by_depth};
  }
};

/// Which of the two forms a register holds: rows of A, [line, word]; or columns of B, [word, line].
enum class TileForm { kRows, kColumns };

inline void transpose_tile(const Word* from, int64_t stride, Word* to) {
  for (int64_t i = 0; i < kTileRows; i += kLanes) {
    for (int64_t j = 0; j < kTileWords; j += kLanes) {
      transpose(from + i * stride + j, stride, to + j * kTileWords + i, kTileWords);
    }
  }
}

/// to[i] = the words of two rows of 16 elements.
inline void join_rows(const Bf16* even, const Bf16* odd, Word* to) {
  for (int64_t i = 0; i < kTileWords; i += kLanes) {
    simd::HalfVec low, high;
    std::memcpy(&low, even + i, sizeof(low));
    std::memcpy(&high, odd + i, sizeof(high));
    store_words(to + i, __builtin_convertvector(low, simd::WordVec) |
                            (__builtin_convertvector(high, simd::WordVec) << 16));
  }
}

/// One register from 16 whole lines and 32 elements of each.
template <TileForm kForm>
void pack_tile(const Lines& lines, Word* to) {
  if (lines.by_depth) {
    Word joined[kTileSize];
    Word* columns = kForm == TileForm::kColumns ? to : joined;
    for (int64_t k = 0; k < kTileWords; ++k) {
      const Bf16* even = lines.data + 2 * k * lines.stride;
      join_rows(even, even + lines.stride, columns + k * kTileWords);
    }
    if (kForm == TileForm::kRows) transpose_tile(joined, kTileWords, to);
    return;
  }
  Word copied[kTileSize];
  Word* rows = kForm == TileForm::kRows ? to : copied;
  for (int64_t i = 0; i < kTileRows; ++i) {
    std::memcpy(rows + i * kTileWords, lines.data + i * lines.stride, kTileWords * sizeof(Word));
  }
  if (kForm == TileForm::kColumns) transpose_tile(copied, kTileWords, to);
}

/// One register where fewer lines or elements are there; the others count as 0.
template <TileForm kForm>
void pack_part(const Lines& lines, int64_t num_lines, int64_t depth, Word* to) {
  Bf16 whole[kTileRows * kTileDepth];
  std::memset(static_cast<void*>(whole), 0, sizeof(whole));
  const int64_t stride = lines.by_depth ? kTileRows : kTileDepth;
  const int64_t runs = lines.by_depth ? depth : num_lines;
  const int64_t length = lines.by_depth ? num_lines : depth;
  for (int64_t i = 0; i < runs; ++i) {
    std::memcpy(static_cast<void*>(whole + i * stride), lines.data + i * lines.stride,
                static_cast<size_t>(length) * sizeof(Bf16));
  }
  pack_tile<kForm>({whole, stride, lines.by_depth}, to);
}

/// Words of a line of `depth` elements, filled up to whole registers.
inline int64_t padded_words(int64_t depth) {
  return (depth + kTileDepth - 1) / kTileDepth * kTileWords;
}

/// Panels of 32 lines each, from the first line on, padded_words(depth) · 32 words apart: for each
/// 32 elements of the depth two registers. What is missing of the last panel and of the depth
/// counts as 0. All panels take a step before any takes the next, so that memory is read in runs.
template <TileForm kForm>
void pack_panels(const Lines& lines, int64_t num_lines, int64_t depth, Word* to) {
  const int64_t line_words = padded_words(depth);
  for (int64_t k = 0; k < depth; k += kTileDepth) {
    const int64_t elements = std::min(depth - k, kTileDepth);
    for (int64_t line = 0; line < num_lines; line += kPanelLines) {
      Word* step = to + line * line_words + k / kTileDepth * kPanelStep;
      for (int64_t half = 0; half < 2; ++half) {
        const int64_t first = line + half * kTileRows;
        const int64_t present = std::clamp<int64_t>(num_lines - first, 0, kTileRows);
        Word* tile = step + half * kTileSize;
        if (present == kTileRows && elements == kTileDepth) {
          pack_tile<kForm>(lines.from(first, k), tile);
        } else if (present == 0) {
          std::memset(tile, 0, kTileSize * sizeof(Word));
        } else {
          pack_part<kForm>(lines.from(first, k), present, elements, tile);
        }
      }
    }
  }
}

}  // namespace tessera::tile
