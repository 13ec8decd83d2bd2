#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "core/dtype.h"
#include "ops/attention/register_product.h"
#include "ops/gemm/tile_permission.h"
#include "ops/gemm/words.h"
#include "ops/simd.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

/// Matrix products of tiles that stay in cache, register-blocked. Operands are *words* of 32 bits:
/// a word is one float or two neighbours along the summed dim in BF16, so that one product serves
/// both. Each row of a result is summed in an order of its own, whatever rows surround it.
namespace tessera::tile {

using simd::kLanes;
using simd::Vec;

/// Registers of one block of C: kBlockRows × kBlockVectors, beside one row of B.
#if defined(__AVX512F__)
inline constexpr int kBlockRows = 6;
inline constexpr int kBlockVectors = 4;
#else
inline constexpr int kBlockRows = 6;
inline constexpr int kBlockVectors = 2;
#endif

inline int64_t round_up(int64_t value, int64_t step) {
  return (value + step - 1) / step * step;
}
inline int64_t num_vectors(int64_t columns) {
  return (columns + kLanes - 1) / kLanes;
}

/// Words of one float.
struct FloatWords {
  using Element = float;
  static constexpr int kPerWord = 1;

  static Vec multiply_add(Vec sum, Word a, simd::WordVec b) {
    return sum + std::bit_cast<Vec>(simd::WordVec{} + a) * std::bit_cast<Vec>(b);
  }
  static void store_pair(Word* to, int64_t stride, Vec even, Vec odd) {
    store_words(to, std::bit_cast<simd::WordVec>(even));
    store_words(to + stride, std::bit_cast<simd::WordVec>(odd));
  }
};

#if defined(__AVX512BF16__)
/// Words of two BF16, multiplied by the CPU's dot products, which sum in F32.
struct Bf16Words {
  using Element = Bf16;
  static constexpr int kPerWord = 2;

  static Vec multiply_add(Vec sum, Word a, simd::WordVec b) {
    return Vec(_mm512_dpbf16_ps(__m512(sum), __m512bh(simd::WordVec{} + a), __m512bh(b)));
  }
  /// Interleaves two rows: lane i gets (even[i], odd[i]).
  static void store_pair(Word* to, int64_t /*stride*/, Vec even, Vec odd) {
    const auto low = __builtin_convertvector(halves(even), simd::WordVec);
    const auto high = __builtin_convertvector(halves(odd), simd::WordVec);
    store_words(to, low | (high << 16));
  }
  static simd::HalfVec halves(Vec x) { return simd::HalfVec(_mm512_cvtneps_pbh(__m512(x))); }
};
#endif

/// The words that tensors of type T are multiplied in.
#if defined(__AVX512BF16__)
template <typename T>
using WordsOf = std::conditional_t<std::is_same_v<T, Bf16>, Bf16Words, FloatWords>;
#else
template <typename T>
using WordsOf = FloatWords;
#endif

template <typename Words>
int64_t words_for(int64_t elements) {
  return (elements + Words::kPerWord - 1) / Words::kPerWord;
}

/// Stores a vector of results as elements, in their order along the row: `idx` is the element.
template <typename Words>
void store_elements(Word* row, int64_t idx, Vec x) {
#if defined(__AVX512BF16__)
  if constexpr (Words::kPerWord == 2) {
    const simd::HalfVec halves = Words::halves(x);
    std::memcpy(reinterpret_cast<std::byte*>(row) + 2 * idx, &halves, sizeof(halves));
    return;
  }
#endif
  store_words(row + idx, std::bit_cast<simd::WordVec>(x));
}

/// C[rows, columns] += A·B over `depth` words, A[i, k] at a[i · a_row + k · a_depth], B[k, j] at
/// b[k · ldb + j]. Without `accumulate`, C is overwritten.
struct Product {
  const Word* a = nullptr;
  int64_t a_row = 0;
  int64_t a_depth = 1;
  const Word* b = nullptr;
  int64_t ldb = 0;
  float* c = nullptr;
  int64_t ldc = 0;
  int64_t depth = 0;
  bool accumulate = false;
};

template <typename Words, int kRows, int kVectors>
[[gnu::noinline]] void multiply_block(const Product& p) {
  Vec sum[kRows][kVectors];
  float* c = p.c;
  const int64_t ldc = p.ldc;
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      sum[i][v] = p.accumulate ? simd::load(c + i * ldc + v * kLanes) : Vec{};
    }
  }
  const Word* a = p.a;
  const Word* b = p.b;
  const int64_t a_row = p.a_row;
  const int64_t a_depth = p.a_depth;
  const int64_t ldb = p.ldb;
  for (int64_t k = p.depth; k > 0; --k, a += a_depth, b += ldb) {
    simd::WordVec row[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) row[v] = load_words(b + v * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const Word factor = a[i * a_row];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        sum[i][v] = Words::multiply_add(sum[i][v], factor, row[v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) simd::store(c + i * ldc + v * kLanes, sum[i][v]);
  }
}

template <typename Words, int kRows>
void multiply_rows(int vectors, const Product& p) {
  static_assert(kBlockVectors <= 4);
  if (vectors == kBlockVectors) return multiply_block<Words, kRows, kBlockVectors>(p);
  if (vectors == 1) return multiply_block<Words, kRows, 1>(p);
  if constexpr (kBlockVectors > 2) {
    if (vectors == 2) return multiply_block<Words, kRows, 2>(p);
    if (vectors == 3) return multiply_block<Words, kRows, 3>(p);
  }
}

template <typename Words>
void multiply_strip(int rows, int vectors, const Product& p) {
  static_assert(kBlockRows == 6);
  switch (rows) {
    case 6:
      return multiply_rows<Words, 6>(vectors, p);
    case 5:
      return multiply_rows<Words, 5>(vectors, p);
    case 4:
      return multiply_rows<Words, 4>(vectors, p);
    case 3:
      return multiply_rows<Words, 3>(vectors, p);
    case 2:
      return multiply_rows<Words, 2>(vectors, p);
    default:
      return multiply_rows<Words, 1>(vectors, p);
  }
}

/// Which part of its product a strip of rows needs: columns before `columns`, and the words from
/// `first_word` to `end_word` of the summed dim.
struct StripLimit {
  int64_t columns = 0;
  int64_t first_word = 0;
  int64_t end_word = 0;
};

/// `multiply` on tile registers, by strips of 32 rows.
template <typename Limit>
void multiply_on_registers(int64_t rows, int64_t columns, const Product& p, const Limit& limit) {
  constexpr int64_t kStrip = 2 * kTileRows;
  RegisterProduct<AmxTiles> registers;
  for (int64_t row = 0; row < rows; row += kStrip) {
    const int64_t end_row = std::min(rows, row + kStrip);
    const StripLimit strip = limit(row, end_row);
    registers.run({.a = p.a + row * p.a_row + strip.first_word * p.a_depth,
                   .a_row = p.a_row,
                   .a_depth = p.a_depth,
                   .b = p.b + strip.first_word * p.ldb,
                   .ldb = p.ldb,
                   .c = p.c + row * p.ldc,
                   .ldc = p.ldc,
                   .rows = end_row - row,
                   .columns = round_up(std::min(columns, strip.columns), kTileWords),
                   .depth = std::max<int64_t>(0, strip.end_word - strip.first_word),
                   .accumulate = p.accumulate});
  }
}

/// Runs `p` (whose depth is ignored) for `rows` rows and `columns` columns, by strips of kBlockRows
/// rows; `limit(first_row, end_row)` gives each strip's StripLimit. Columns are rounded up to whole
/// vectors. A panel of B stays in the innermost cache while all strips pass.
template <typename Words, typename Limit>
void multiply(int64_t rows, int64_t columns, const Product& p, const Limit& limit) {
  if (Words::kPerWord == 2 && may_use_tiles()) {
    return multiply_on_registers(rows, columns, p, limit);
  }
  const int64_t vectors = num_vectors(columns);
  const int64_t panels = (vectors + kBlockVectors - 1) / kBlockVectors;
  for (int64_t panel = 0; panel < panels; ++panel) {
    const int64_t begin = vectors * panel / panels;
    const int64_t end = vectors * (panel + 1) / panels;
    for (int64_t row = 0; row < rows; row += kBlockRows) {
      const int64_t end_row = std::min(rows, row + kBlockRows);
      const StripLimit strip = limit(row, end_row);
      const int64_t width = std::min(end, num_vectors(strip.columns)) - begin;
      if (width <= 0) continue;
      Product part = p;
      part.a += row * p.a_row + strip.first_word * p.a_depth;
      part.b += begin * kLanes + strip.first_word * p.ldb;
      part.c += row * p.ldc + begin * kLanes;
      part.depth = std::max<int64_t>(0, strip.end_word - strip.first_word);
      multiply_strip<Words>(static_cast<int>(end_row - row), static_cast<int>(width), part);
    }
  }
}

/// `count` rows of `columns` elements; `group` neighbouring rows lie together, each such group
/// `stride` elements after the one before. Rows from `count` on count as zero.
template <typename T>
struct Rows {
  T* data = nullptr;
  int64_t stride = 0;
  int64_t count = 0;
  int64_t columns = 0;
  int64_t group = 1;

  T* row(int64_t idx) const { return data + idx / group * stride + idx % group * columns; }
};

/// A copy of a short row, without a library call for each.
template <typename T>
void copy_elements(T* to, const T* from, int64_t count) {
  constexpr int64_t kStep = sizeof(Vec) / sizeof(T);
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    std::memcpy(static_cast<void*>(to + i), from + i, sizeof(Vec));
  }
  for (; i < count; ++i) to[i] = from[i];
}

/// The elements of one row in the words' order; the rest of `width` words is zero.
template <typename Words, typename T>
void pack_row(const T* from, int64_t columns, Word* to, int64_t width) {
  using Element = typename Words::Element;
  auto* elements = reinterpret_cast<Element*>(to);
  if constexpr (std::is_same_v<T, Element>) {
    copy_elements(elements, from, columns);
  } else {
    simd::convert(elements, from, columns);
  }
  const int64_t rest = width * Words::kPerWord - columns;
  if (rest > 0) {
    std::memset(static_cast<void*>(elements + columns), 0,
                static_cast<size_t>(rest) * sizeof(Element));
  }
}

/// Rows begin to begin + n as they are: words[n, width], summed along the columns as operand A.
template <typename Words, typename T>
void pack_rows(const Rows<const T>& rows, int64_t begin, int64_t n, Word* to, int64_t width) {
  const int64_t present = std::clamp<int64_t>(rows.count - begin, 0, n);
  for (int64_t i = 0; i < present; ++i) {
    pack_row<Words>(rows.row(begin + i), rows.columns, to + i * width, width);
  }
  std::memset(to + present * width, 0, static_cast<size_t>((n - present) * width) * sizeof(Word));
}

/// Operand B summed along the rows: words[n / kPerWord, width], `n` a multiple of kPerWord.
template <typename Words, typename T>
void pack_interleaved(const Rows<const T>& rows, int64_t n, Word* to, int64_t width) {
  if constexpr (Words::kPerWord == 1) {
    pack_rows<Words>(rows, 0, n, to, width);
  } else {
    for (int64_t i = 0; i < n; i += 2, to += width) {
      const int64_t columns = i < rows.count ? rows.columns : 0;
      const auto* even = reinterpret_cast<const uint16_t*>(rows.row(i));
      const auto* odd = reinterpret_cast<const uint16_t*>(rows.row(i + 1));
      if (i + 1 < rows.count) {
        for (int64_t j = 0; j < columns; ++j) to[j] = even[j] | static_cast<Word>(odd[j]) << 16;
      } else {
        for (int64_t j = 0; j < columns; ++j) to[j] = even[j];
      }
      std::fill(to + columns, to + width, Word{0});
    }
  }
}

/// Operand B summed along the columns: words[width, ldb] of n rows, n rounded up to kLanes;
/// `width` is a multiple of kLanes. `scratch` has kLanes × width words.
template <typename Words, typename T>
void pack_transposed(const Rows<const T>& rows, int64_t n, Word* to, int64_t ldb, int64_t width,
                     Word* scratch) {
  for (int64_t i = 0; i < n; i += kLanes) {
    pack_rows<Words>(rows, i, kLanes, scratch, width);
    for (int64_t j = 0; j < width; j += kLanes) {
      transpose(scratch + j, width, to + j * ldb + i, ldb);
    }
  }
}

/// 2^x for x <= 127, relative error under 2e-7; 0 below -126.5; NaN stays NaN. (Cephes exp2f.)
inline Vec exp2(Vec x) {
  x = simd::max(Vec{} - 127.0F, x);      // NaN stays, as the second operand
  constexpr float kRound = 12582912.0F;  // 1.5 · 2^23: adding it rounds to an integer
  const Vec shifted = x + kRound;
  const Vec f = x - (shifted - kRound);
  Vec y = f * 1.535336188319500e-4F + 1.339887440266574e-3F;
  y = y * f + 9.618437357674640e-3F;
  y = y * f + 5.550332471162809e-2F;
  y = y * f + 2.402264791363012e-1F;
  y = y * f + 6.931472028550421e-1F;
  y = y * f + 1.0F;
  const auto exponent = (std::bit_cast<simd::WordVec>(shifted) + 127U) << 23;
  return y * std::bit_cast<Vec>(exponent);
}

/// Each lane's partner at distance kStep.
template <int kStep, size_t... kIdx>
Vec swap_lanes(Vec x, std::index_sequence<kIdx...> /*lanes*/) {
  return __builtin_shufflevector(x, x, (static_cast<int>(kIdx) ^ kStep)...);
}

/// The greatest lane and the sum of the lanes, in every lane.
template <int kStep = kLanes / 2, typename Combine>
Vec reduce(Vec x, const Combine& combine) {
  x = combine(x, swap_lanes<kStep>(x, std::make_index_sequence<kLanes>()));
  if constexpr (kStep > 1) {
    return reduce<kStep / 2>(x, combine);
  } else {
    return x;
  }
}
inline Vec reduce_max(Vec x) {
  return reduce(x, [](Vec a, Vec b) { return simd::max(a, b); });
}
inline Vec reduce_sum(Vec x) {
  return reduce(x, [](Vec a, Vec b) { return a + b; });
}

/// The lane numbers from `first` on.
inline simd::IntVec lane_numbers(int64_t first) {
  simd::IntVec lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  return lanes + static_cast<int32_t>(first);
}

}  // namespace tessera::tile
