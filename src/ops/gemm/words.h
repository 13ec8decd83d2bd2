#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "ops/simd.h"

/// Words of 32 bits: one float, or two BF16 that are neighbours along the summed dim of a product.
namespace tessera::tile {

using simd::kLanes;
using Word = uint32_t;

inline simd::WordVec load_words(const Word* from) {
  simd::WordVec x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

inline void store_words(Word* to, simd::WordVec x) {
  std::memcpy(to, &x, sizeof(x));
}

/// The words of the low halves (kHalf 0) or of the high halves of `a` and `b`, in turn.
template <int kHalf, size_t... kIdx>
simd::WordVec interleave(simd::WordVec a, simd::WordVec b, std::index_sequence<kIdx...> /*lanes*/) {
  return __builtin_shufflevector(a, b,
                                 (static_cast<int>(kIdx) / 2 +
                                  (static_cast<int>(kIdx) % 2) * kLanes + kHalf * (kLanes / 2))...);
}

/// Transposes kLanes × kLanes words by rounds of interleaving the halves.
inline void transpose(const Word* from, int64_t from_stride, Word* to, int64_t to_stride) {
  constexpr auto kAll = std::make_index_sequence<kLanes>();
  simd::WordVec rows[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) rows[i] = load_words(from + i * from_stride);
#pragma GCC unroll 4
  for (int round = 1; round < kLanes; round *= 2) {
    simd::WordVec next[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = interleave<0>(rows[i], rows[i + kLanes / 2], kAll);
      next[2 * i + 1] = interleave<1>(rows[i], rows[i + kLanes / 2], kAll);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) rows[i] = next[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) store_words(to + i * to_stride, rows[i]);
}

}  // namespace tessera::tile
