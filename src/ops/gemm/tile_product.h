#pragma once

#include <algorithm>
#include <span>

#include "ops/gemm/gemm.h"
#include "ops/gemm/tile_packing.h"

/// Products of BF16 on tile registers, by one thread: blocks of both operands are packed into
/// scratch memory, in the order in which registers take them, and meet 32 × 32 results at a time.
namespace tessera::tile {

/// A block of B is this much of the depth and of the columns: half a MiB, half of what one of two
/// threads has of a core's second-level cache.
inline constexpr int64_t kBlockDepth = 512;
inline constexpr int64_t kBlockColumns = 512;
/// Rows of A that are packed together.
inline constexpr int64_t kBlockRows = 128;
/// Rows of a BF16 result whose sums are kept in F32 where the depth is more than a block's.
inline constexpr int64_t kSumRows = 256;

/// Words of scratch memory: a block of B, one of A, a result's place, sums.
struct TileScratch {
  static constexpr int64_t kB = kBlockDepth / 2 * kBlockColumns;
  static constexpr int64_t kA = kBlockDepth / 2 * kBlockRows;
  static constexpr int64_t kResult = kPanelLines * kPanelLines;
  static constexpr int64_t kSums = kSumRows * kBlockColumns;
  static constexpr int64_t kWords = kB + kA + kResult + kSums;
};

/// to[i] = from[i], rounded to nearest even.
inline void narrow(Bf16* to, const float* from, int64_t count) {
#if defined(__AVX512BF16__)
  constexpr int64_t kStep = kLanes;
  for (; count >= kStep; to += kStep, from += kStep, count -= kStep) {
    const auto halves = simd::HalfVec(_mm512_cvtneps_pbh(__m512(simd::load(from))));
    std::memcpy(static_cast<void*>(to), &halves, sizeof(halves));
  }
#endif
  simd::convert(to, from, count);
}

/// One product by one thread with its `Tiles`.
template <typename Tiles>
class TileProduct {
 public:
  /// `scratch`: TileScratch::kWords, at a multiple of 64 bytes.
  TileProduct(const Gemm& product, Word* scratch)
      : p_(product),
        a_lines_{static_cast<const Bf16*>(product.a), product.lda, product.transpose_a},
        b_lines_{static_cast<const Bf16*>(product.b), product.ldb, !product.transpose_b},
        b_(scratch),
        a_(b_ + TileScratch::kB),
        result_(reinterpret_cast<float*>(a_ + TileScratch::kA)),
        sums_(result_ + TileScratch::kResult) {}

  void run() {
    const bool sums = p_.output_type == DType::kBF16 && p_.k > kBlockDepth;
    const int64_t step = sums ? kSumRows : p_.m;
    for (int64_t row = 0; row < p_.m; row += step) {
      for (int64_t col = 0; col < p_.n; col += kBlockColumns) {
        run_block({row, std::min(step, p_.m - row)}, {col, std::min(kBlockColumns, p_.n - col)},
                  sums);
      }
    }
  }

 private:
  struct Range {
    int64_t first = 0;
    int64_t count = 0;
  };

  void run_block(Range rows, Range cols, bool sums) {
    for (int64_t k = 0; k < p_.k; k += kBlockDepth) {
      const Range depth{k, std::min(kBlockDepth, p_.k - k)};
      pack_panels<TileForm::kColumns>(b_lines_.from(cols.first, k), cols.count, depth.count, b_);
      for (int64_t row = 0; row < rows.count; row += kBlockRows) {
        const int64_t count = std::min(kBlockRows, rows.count - row);
        pack_panels<TileForm::kRows>(a_lines_.from(rows.first + row, k), count, depth.count, a_);
        for (int64_t i = 0; i < count; i += kPanelLines) {
          const Range panel{rows.first + row + i, std::min(kPanelLines, count - i)};
          run_panel(a_ + i * padded_words(depth.count), panel, cols, depth,
                    sums ? sums_ + (row + i) * kBlockColumns : nullptr);
        }
      }
    }
  }

  /// A panel of A with all panels of B; a result whose sums are kept goes to `sums` first.
  void run_panel(const Word* a, Range rows, Range cols, Range depth, float* sums) {
    const bool last = depth.first + depth.count == p_.k;
    const bool accumulate = p_.accumulate || depth.first > 0;
    for (int64_t col = 0; col < cols.count; col += kPanelLines) {
      const Word* b = b_ + col * padded_words(depth.count);
      const Range part{cols.first + col, std::min(kPanelLines, cols.count - col)};
      if (sums != nullptr) {
        multiply(a, b, depth.count, sums + col, kBlockColumns, accumulate);
        if (last) store(sums + col, kBlockColumns, rows, part);
      } else if (p_.output_type == DType::kF32 && rows.count == kPanelLines &&
                 part.count == kPanelLines) {
        if (col + 2 * kPanelLines <= cols.count) prefetch(rows, part);
        multiply(a, b, depth.count, at<float>(rows, part), p_.ldc, accumulate);
      } else {
        if (accumulate) fetch(rows, part);
        multiply(a, b, depth.count, result_, kPanelLines, accumulate);
        store(result_, kPanelLines, rows, part);
      }
    }
  }

  /// c[32, 32] = or += a panel of A times one of B.
  void multiply(const Word* a, const Word* b, int64_t depth, float* c, int64_t ldc,
                bool accumulate) {
    struct Operands {
      const Word* a[2];
      const Word* b[2];
      int64_t a_stride = kTileWords;
      int64_t b_stride = kTileWords;
    };
    begin_four(tiles_, c, ldc, accumulate);
    multiply_four(tiles_, padded_words(depth) / kTileWords, [a, b](int64_t step) {
      const Word* a_step = a + step * kPanelStep;
      const Word* b_step = b + step * kPanelStep;
      return Operands{{a_step, a_step + kTileSize}, {b_step, b_step + kTileSize}};
    });
    end_four(tiles_, c, ldc);
  }

  /// Brings the part of C behind `cols`, which comes next, while this one is computed.
  void prefetch(Range rows, Range cols) const {
    constexpr int64_t kLine = 64 / sizeof(float);
    for (int64_t i = 0; i < rows.count; ++i) {
      const float* next = at<float>(rows, cols) + i * p_.ldc + kPanelLines;
      __builtin_prefetch(next, 1);
      __builtin_prefetch(next + kLine, 1);
    }
  }

  template <typename T>
  T* at(Range rows, Range cols) const {
    return static_cast<T*>(p_.c) + rows.first * p_.ldc + cols.first;
  }

  /// What is there of C goes to the result's place.
  void fetch(Range rows, Range cols) {
    for (int64_t i = 0; i < rows.count; ++i) {
      std::copy_n(at<float>(rows, cols) + i * p_.ldc, cols.count, result_ + i * kPanelLines);
    }
  }

  void store(const float* from, int64_t stride, Range rows, Range cols) {
    for (int64_t i = 0; i < rows.count; ++i) {
      if (p_.output_type == DType::kBF16) {
        narrow(at<Bf16>(rows, cols) + i * p_.ldc, from + i * stride, cols.count);
      } else {
        std::copy_n(from + i * stride, cols.count, at<float>(rows, cols) + i * p_.ldc);
      }
    }
  }

  const Gemm& p_;
  Lines a_lines_;
  Lines b_lines_;
  Word* b_;
  Word* a_;
  float* result_;
  float* sums_;
  Tiles tiles_;
};

}  // namespace tessera::tile
