#pragma once

#include <array>
#include <utility>

#include "ops/gemm/gemm.h"
#include "ops/gemm/vector_packing.h"

/// Products of F32 in vector registers, by one thread: blocks of both operands are packed into
/// scratch memory, in the order in which they are read, and a panel of A's rows meets two vectors
/// of B's columns at a time, with all sums in registers (Goto and van de Geijn, Anatomy of
/// High-Performance Matrix Multiplication, section 4).
namespace tessera::panel {

using simd::Vec;

/// Rows of a panel of A: with two vectors of columns each, the sums and what they are made of
/// fill the registers, 32 or 16.
inline constexpr int kPanelRows = kLanes == 16 ? 14 : 6;
/// What a panel of A takes of each element of the depth, so that whole vectors are transposed.
inline constexpr int64_t kRowStride = kLanes;
inline constexpr int64_t kPanelColumns = 2 * kLanes;

/// A panel of A is this much of the depth, 16 KiB, and stays in the first-level cache.
inline constexpr int64_t kPanelDepth = 256;
/// A block of B is this much of the depth and of the columns: half a MiB, half of what one of two
/// threads has of a core's second-level cache. What a panel of A gives to C stays in caches until
/// the block's depth is through, so that C goes to memory once for each block.
inline constexpr int64_t kBlockDepth = 2 * kPanelDepth;
inline constexpr int64_t kBlockColumns = 256;
/// Panels of A that are packed together.
inline constexpr int64_t kGroupPanels = 6;

/// Floats of scratch memory: a block of B, panels of A, a result's place.
struct VectorScratch {
  static constexpr int64_t kB = kBlockDepth * kBlockColumns;
  static constexpr int64_t kA = kGroupPanels * kPanelDepth * kRowStride;
  static constexpr int64_t kResult = kPanelRows * kPanelColumns;
  static constexpr int64_t kFloats = kB + kA + kResult;
};

/// Loads one float into all lanes, which simd::broadcast adds to zeros.
template <size_t... kIdx>
Vec load_to_all(const float* from, std::index_sequence<kIdx...> /*lanes*/) {
  return Vec{(static_cast<void>(kIdx), *from)...};
}

/// c[kRows, kPanelColumns] = or += a panel of A times one of B.
template <int kRows>
void multiply_panels(const float* a, const float* b, int64_t depth, float* c, int64_t ldc,
                     bool accumulate) {
  constexpr auto kAll = std::make_index_sequence<kLanes>();
  Vec sums[kRows][2] = {};
  // C comes while the sums are made.
  for (int i = 0; i < kRows; ++i) {
    __builtin_prefetch(c + i * ldc, 1);
    __builtin_prefetch(c + i * ldc + kLanes, 1);
  }
#pragma GCC unroll 2
  for (int64_t k = 0; k < depth; ++k, a += kRowStride, b += kPanelColumns) {
    const Vec b0 = simd::load(b);
    const Vec b1 = simd::load(b + kLanes);
#pragma GCC unroll 14
    for (int i = 0; i < kRows; ++i) {
      const Vec x = load_to_all(a + i, kAll);
      sums[i][0] += x * b0;
      sums[i][1] += x * b1;
    }
  }
#pragma GCC unroll 14
  for (int i = 0; i < kRows; ++i) {
    float* row = c + i * ldc;
    simd::store(row, accumulate ? simd::load(row) + sums[i][0] : sums[i][0]);
    simd::store(row + kLanes, accumulate ? simd::load(row + kLanes) + sums[i][1] : sums[i][1]);
  }
}

using MultiplyPanels = void (*)(const float*, const float*, int64_t, float*, int64_t, bool);

template <size_t... kIdx>
constexpr auto panel_products(std::index_sequence<kIdx...> /*rows*/) {
  return std::array<MultiplyPanels, sizeof...(kIdx)>{
      multiply_panels<static_cast<int>(kIdx) + 1>...};
}

/// multiply_panels for 1, 2, ... kPanelRows rows.
inline constexpr auto kPanelProducts = panel_products(std::make_index_sequence<kPanelRows>());

/// One product by one thread. A row's sums do not depend on the rows beside it.
class VectorProduct {
 public:
  /// `scratch`: VectorScratch::kFloats, at a multiple of 64 bytes.
  VectorProduct(const Gemm& product, float* scratch)
      : p_(product),
        a_lines_{static_cast<const float*>(product.a), product.lda, product.transpose_a},
        b_lines_{static_cast<const float*>(product.b), product.ldb, !product.transpose_b},
        b_(scratch),
        a_(b_ + VectorScratch::kB),
        result_(a_ + VectorScratch::kA) {}

  void run() {
    for (int64_t col = 0; col < p_.n; col += kBlockColumns) {
      const Range cols{col, std::min(kBlockColumns, p_.n - col)};
      for (int64_t k = 0; k < p_.k; k += kBlockDepth) {
        const Range depth{k, std::min(kBlockDepth, p_.k - k)};
        for_each_part(depth, [&](Range part, float* b) { pack_b(cols, part, b); });
        multiply_rows(cols, depth);
      }
    }
  }

 private:
  struct Range {
    int64_t first = 0;
    int64_t count = 0;
  };

  /// part(a panel's depth, where B's panels of that depth are) for what a block has of the depth.
  template <typename Part>
  void for_each_part(Range depth, Part part) {
    for (int64_t k = 0; k < depth.count; k += kPanelDepth) {
      part(Range{depth.first + k, std::min(kPanelDepth, depth.count - k)}, b_ + k * kBlockColumns);
    }
  }

  void pack_b(Range cols, Range depth, float* b) {
    pack_panels<kPanelColumns>(b_lines_.from(cols.first, depth.first), {cols.count, kPanelColumns},
                               depth.count, b);
  }

  /// All rows of A, in panels of nearly the same size, with the block of B.
  void multiply_rows(Range cols, Range depth) {
    const int64_t num_panels = (p_.m + kPanelRows - 1) / kPanelRows;
    const int64_t step = (p_.m + num_panels - 1) / num_panels;
    for (int64_t row = 0; row < p_.m; row += kGroupPanels * step) {
      const Range rows{row, std::min(kGroupPanels * step, p_.m - row)};
      for_each_part(depth, [&](Range part, const float* b) {
        multiply_group(rows, {rows.count, step}, cols, part, b);
      });
    }
  }

  void multiply_group(Range rows, const PanelCut& cut, Range cols, Range depth, const float* b) {
    pack_panels<kRowStride>(a_lines_.from(rows.first, depth.first), cut, depth.count, a_);
    for (int64_t panel = 0; panel < cut.num_panels(); ++panel) {
      run_panel(a_ + panel * depth.count * kRowStride,
                {rows.first + cut.first_line(panel), cut.lines_of(panel)}, cols, depth, b);
    }
  }

  /// A panel of A with all panels of B.
  void run_panel(const float* a, Range rows, Range cols, Range depth, const float* panels) {
    const MultiplyPanels multiply = kPanelProducts[rows.count - 1];
    const bool accumulate = p_.accumulate || depth.first > 0;
    for (int64_t col = 0; col < cols.count; col += kPanelColumns) {
      const Range part{cols.first + col, std::min(kPanelColumns, cols.count - col)};
      const float* b = panels + col * depth.count;
      if (part.count == kPanelColumns) {
        multiply(a, b, depth.count, at(rows, part), p_.ldc, accumulate);
        continue;
      }
      if (accumulate) copy(rows, part, [](float& here, float& there) { there = here; });
      multiply(a, b, depth.count, result_, kPanelColumns, accumulate);
      copy(rows, part, [](float& here, float& there) { here = there; });
    }
  }

  float* at(Range rows, Range cols) const {
    return static_cast<float*>(p_.c) + rows.first * p_.ldc + cols.first;
  }

  /// move(an element of C, its place among the results) for a panel that is not whole.
  template <typename Move>
  void copy(Range rows, Range cols, Move move) {
    for (int64_t i = 0; i < rows.count; ++i) {
      float* c = at(rows, cols) + i * p_.ldc;
      for (int64_t j = 0; j < cols.count; ++j) move(c[j], result_[i * kPanelColumns + j]);
    }
  }

  const Gemm& p_;
  Lines a_lines_, b_lines_;
  float* b_;
  float* a_;
  float* result_;
};

}  // namespace tessera::panel
