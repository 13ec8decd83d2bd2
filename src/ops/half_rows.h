#pragma once

#include <immintrin.h>

#include <cstdint>

#include "core/half.h"

/// Rows of halves from and to F32, eight at a time by the processor's own conversions (F16C, which
/// all CPU levels have): the bits of Half. Always inlined, so that sources for several levels share
/// no function.
namespace tessera {

__attribute__((always_inline)) inline void to_floats(const Half* from, float* to, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(halves));
  }
  for (; i < count; ++i) to[i] = static_cast<float>(from[i]);
}

__attribute__((always_inline)) inline void to_halves(const float* from, Half* to, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), halves);
  }
  for (; i < count; ++i) to[i] = Half(from[i]);
}

}  // namespace tessera
