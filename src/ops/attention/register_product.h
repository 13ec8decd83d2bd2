#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ops/gemm/tile_registers.h"

/// Products of words of two BF16 on tile registers (AMX), for operands that stay in cache.
namespace tessera::tile {

/// What one strip of at most 32 rows takes: C[rows, columns] = or += A·B over `depth` words; A[i,
/// k] at a[i · a_row + k · a_depth], where a_row or a_depth is 1. `columns` is a multiple of 16.
struct RegisterStrip {
  const Word* a = nullptr;
  int64_t a_row = 0;
  int64_t a_depth = 1;
  const Word* b = nullptr;
  int64_t ldb = 0;
  float* c = nullptr;
  int64_t ldc = 0;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t depth = 0;
  bool accumulate = false;
};

/// Multiplies strips by one thread with its `Tiles`. A strip's A is packed, B is read where it is.
template <typename Tiles>
class RegisterProduct {
 public:
  void run(const RegisterStrip& strip) {
    if (strip.rows <= 0 || strip.columns <= 0) return;
    int64_t word = 0;
    do {  // without any depth, zeros are written
      const int64_t depth = std::min(strip.depth - word, kMostSteps * kTileWords);
      RegisterStrip part = strip;
      part.a += word * strip.a_depth;
      part.b += word * strip.ldb;
      part.depth = std::max<int64_t>(depth, 0);
      part.accumulate = strip.accumulate || word > 0;
      run_depth(part);
      word += depth;
    } while (word < strip.depth);
  }

 private:
  static constexpr int64_t kMostSteps = 8;
  static constexpr int64_t kLines = 2 * kTileRows;

  void run_depth(const RegisterStrip& strip) {
    const int64_t steps = (strip.depth + kTileWords - 1) / kTileWords;
    for (int64_t step = 0; step < steps; ++step) {
      const int64_t words = std::min(kTileWords, strip.depth - step * kTileWords);
      pack_a(strip, step * kTileWords, words, a_ + step * kLines * kTileWords);
    }
    for (int64_t column = 0; column < strip.columns; column += kLines) {
      run_columns(strip, column, steps);
    }
  }

  /// 32 rows of 16 words, zeros for those that are not there.
  static void pack_a(const RegisterStrip& strip, int64_t word, int64_t words, Word* to) {
    const Word* from = strip.a + word * strip.a_depth;
    if (words < kTileWords || strip.rows < kLines) {
      std::memset(to, 0, kLines * kTileWords * sizeof(Word));
    }
    if (strip.a_depth == 1) {
      const auto bytes = static_cast<size_t>(words) * sizeof(Word);
      for (int64_t i = 0; i < strip.rows; ++i) {
        std::memcpy(to + i * kTileWords, from + i * strip.a_row, bytes);
      }
      return;
    }
    if (words == kTileWords && strip.rows == kLines) {
      for (int64_t i = 0; i < kLines; i += kLanes) {
        for (int64_t k = 0; k < kTileWords; k += kLanes) {
          transpose(from + k * strip.a_depth + i, strip.a_depth, to + i * kTileWords + k,
                    kTileWords);
        }
      }
      return;
    }
    for (int64_t k = 0; k < words; ++k) {
      for (int64_t i = 0; i < strip.rows; ++i) {
        to[i * kTileWords + k] = from[i * strip.a_row + k * strip.a_depth];
      }
    }
  }

  void run_columns(const RegisterStrip& strip, int64_t column, int64_t steps) {
    const int64_t columns = std::min(kLines, strip.columns - column);
    float* c = strip.c + column;
    if (strip.rows == kLines && columns == kLines) {
      return multiply(strip, column, steps, c, strip.ldc);
    }
    for (int64_t i = 0; i < strip.rows && strip.accumulate; ++i) {
      std::copy_n(c + i * strip.ldc, columns, result_ + i * kLines);
    }
    multiply(strip, column, steps, result_, kLines);
    for (int64_t i = 0; i < strip.rows; ++i) {
      std::copy_n(result_ + i * kLines, columns, c + i * strip.ldc);
    }
  }

  void multiply(const RegisterStrip& strip, int64_t column, int64_t steps, float* c, int64_t ldc) {
    begin_four(tiles_, c, ldc, strip.accumulate);
    const bool wide = strip.columns - column >= kLines;
    const int64_t whole = wide ? strip.depth / kTileWords : 0;
    const Word* b = strip.b + column;
    multiply_four(tiles_, whole, [&](int64_t step) {
      const Word* b_step = b + step * kTileWords * strip.ldb;
      return operands(step, b_step, b_step + kTileWords, strip.ldb);
    });
    for (int64_t step = whole; step < steps; ++step) {
      pack_b(strip, column, step * kTileWords);
      multiply_four(tiles_, 1, [&](int64_t /*step*/) {
        return operands(step, b_, b_ + kTileSize, kTileWords);
      });
    }
    end_four(tiles_, c, ldc);
  }

  struct Operands {
    const Word* a[2];
    const Word* b[2];
    int64_t a_stride = kTileWords;
    int64_t b_stride = kTileWords;
  };
  Operands operands(int64_t step, const Word* left, const Word* right, int64_t stride) const {
    const Word* a = a_ + step * kLines * kTileWords;
    return {.a = {a, a + kTileSize}, .b = {left, right}, .b_stride = stride};
  }

  /// Two registers of B where words or columns are missing, as zeros.
  void pack_b(const RegisterStrip& strip, int64_t column, int64_t word) {
    std::memset(b_, 0, sizeof(b_));
    const int64_t words = std::min(kTileWords, strip.depth - word);
    for (int64_t j = 0; j < kLines && column + j < strip.columns; j += kTileWords) {
      for (int64_t k = 0; k < words; ++k) {
        std::memcpy(b_ + (j + k) * kTileWords, strip.b + (word + k) * strip.ldb + column + j,
                    kTileWords * sizeof(Word));
      }
    }
  }

  alignas(64) Word a_[kMostSteps * kLines * kTileWords];
  alignas(64) Word b_[2 * kTileSize];
  alignas(64) float result_[kLines * kLines];
  Tiles tiles_;
};

}  // namespace tessera::tile
