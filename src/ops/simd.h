#pragma once

#include <immintrin.h>

#include <bit>
#include <cstdint>
#include <cstring>

#include "core/dtype.h"
#include "ops/cpu_dispatch.h"

/// Vector code in GCC's vector extensions, which the compiler lowers to what the CPU level has.
/// Kernels load F32 or BF16, compute in F32 vectors, and store either.
namespace tessera::simd {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#else
inline constexpr int kLanes = 8;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t WordVec __attribute__((vector_size(kLanes * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(kLanes * 2)));

typedef double WideVec __attribute__((vector_size(kLanes * 8)));

inline Vec broadcast(float x) {
  return Vec{} + x;
}

inline Vec load(const float* from) {
  Vec x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

inline Vec load(const Bf16* from) {
#if defined(__AVX512BW__)
  // Fewer instructions than the conversion below, which GCC makes of halves.
  const __m512i words =
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return Vec(_mm512_slli_epi32(words, 16));
#else
  HalfVec halves;
  std::memcpy(&halves, from, sizeof(halves));
  return std::bit_cast<Vec>(__builtin_convertvector(halves, WordVec) << 16);
#endif
}

inline void store(float* to, Vec x) {
  std::memcpy(to, &x, sizeof(x));
}

#if defined(__AVX512BW__)
/// The BF16 numbers of a vector's lanes, rounded as by Bf16.
inline __m256i to_halves(Vec x) {
  const __m512i words = __m512i(x);
  // Half of the last digit that stays, less one where that digit is even.
  const __mmask16 is_odd = _mm512_test_epi32_mask(words, _mm512_set1_epi32(0x10000));
  __m512i sums = _mm512_add_epi32(words, _mm512_set1_epi32(0x7fff));
  sums = _mm512_mask_add_epi32(sums, is_odd, sums, _mm512_set1_epi32(1));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(__m512(x), __m512(x), _CMP_UNORD_Q);
  sums = _mm512_mask_or_epi32(sums, is_nan, words, _mm512_set1_epi32(0x400000));
  const __m512i upper = _mm512_set_epi16(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 31, 29, 27,
                                         25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  return _mm512_castsi512_si256(_mm512_permutexvar_epi16(upper, sums));
}
#endif

/// Rounds to nearest even, as Bf16 does; NaN stays NaN.
inline void store(Bf16* to, Vec x) {
#if defined(__AVX512BW__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), to_halves(x));
#else
  const WordVec words = std::bit_cast<WordVec>(x);
  const WordVec rounded = (words + 0x7fffU + ((words >> 16) & 1U)) >> 16;
  const auto is_nan = (words & 0x7fffffffU) > 0x7f800000U;
  const HalfVec halves = __builtin_convertvector(is_nan ? (words >> 16) | 0x40U : rounded, HalfVec);
  std::memcpy(static_cast<void*>(to), &halves, sizeof(halves));
#endif
}

/// Asks for what is read a row later. Processors foresee no further than a page, of which a row may
/// be one; past the end of an array nothing happens.
template <typename T>
void prefetch(const T* from) {
  __builtin_prefetch(from);
}

/// How much of a vector a step of for_each_vector covers: all of it, or `count` < kLanes elements
/// at the end of a row. Loads of a part fill the other lanes with 0, stores leave memory past it
/// alone.
struct Whole {};
struct Part {
  int64_t count;
};

template <typename T>
Vec load(const T* from, Whole /*whole*/) {
  return load(from);
}
#if defined(__AVX512BW__)
inline __mmask16 mask_of(Part part) {
  return static_cast<__mmask16>((1U << static_cast<uint32_t>(part.count)) - 1U);
}
inline Vec load(const float* from, Part part) {
  return Vec(_mm512_maskz_loadu_ps(mask_of(part), from));
}
inline void store(float* to, Vec x, Part part) {
  _mm512_mask_storeu_ps(to, mask_of(part), __m512(x));
}
inline Vec load(const Bf16* from, Part part) {
  const __m512i words = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask_of(part), from));
  return Vec(_mm512_slli_epi32(words, 16));
}
inline void store(Bf16* to, Vec x, Part part) {
  _mm256_mask_storeu_epi16(to, mask_of(part), to_halves(x));
}
#endif

template <typename T>
Vec load(const T* from, Part part) {
  Vec x{};
  for (int64_t i = 0; i < part.count; ++i) x[i] = static_cast<float>(from[i]);
  return x;
}

template <typename T>
void store(T* to, Vec x, Whole /*whole*/) {
  store(to, x);
}
template <typename T>
void store(T* to, Vec x, Part part) {
  for (int64_t i = 0; i < part.count; ++i) to[i] = T(x[i]);
}

/// Calls step(i, Whole or Part) for i = 0, kLanes, 2·kLanes, ... below `count`:
///   for_each_vector(n, [&](int64_t i, auto lanes) { store(y + i, 2 * load(x + i, lanes), lanes);
///   });
template <typename Step>
inline __attribute__((always_inline)) void for_each_vector(int64_t count, Step step) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) step(i, Whole{});
  if (i < count) step(i, Part{count - i});
}

/// to[i] = from[i] between any two element types.
template <typename To, typename From>
void convert(To* to, const From* from, int64_t count) {
  for_each_vector(count,
                  [=](int64_t i, auto lanes) { store(to + i, load(from + i, lanes), lanes); });
}

/// The larger and the smaller of two; the second where one is NaN.
inline Vec max(Vec a, Vec b) {
#if defined(__AVX512F__)
  return Vec(_mm512_max_ps(__m512(a), __m512(b)));
#else
  return Vec(_mm256_max_ps(__m256(a), __m256(b)));
#endif
}
inline Vec min(Vec a, Vec b) {
#if defined(__AVX512F__)
  return Vec(_mm512_min_ps(__m512(a), __m512(b)));
#else
  return Vec(_mm256_min_ps(__m256(a), __m256(b)));
#endif
}

/// The sum of all lanes, halves first: a fixed order.
inline float sum(Vec x) {
#if defined(__AVX512F__)
  const __m256 eight =
      _mm256_add_ps(_mm512_castps512_ps256(__m512(x)), _mm512_extractf32x8_ps(__m512(x), 1));
#else
  const __m256 eight = __m256(x);
#endif
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline float max(Vec x) {
#if defined(__AVX512F__)
  const __m256 eight =
      _mm256_max_ps(_mm512_castps512_ps256(__m512(x)), _mm512_extractf32x8_ps(__m512(x), 1));
#else
  const __m256 eight = __m256(x);
#endif
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

/// x · 2^n for integers n from -254 to 254, rounded once.
inline Vec scale_by_power(Vec x, Vec n) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vec>(
      _mm512_scalef_ps(reinterpret_cast<__m512>(x), reinterpret_cast<__m512>(n)));
#else
  // In two factors, since n goes beyond one exponent's range.
  const IntVec exponent = __builtin_convertvector(n, IntVec);
  const IntVec half = exponent >> 1;
  return x * std::bit_cast<Vec>((half + 127) << 23) *
         std::bit_cast<Vec>((exponent - half + 127) << 23);
#endif
}

/// e^x with a relative error below 2e-7 wherever the result is normal; 0 for very negative x and
/// -inf, inf above 88.73, NaN for NaN. Cody and Waite's reduction to |r| <= ln(2) / 2 and the
/// polynomial of Moshier's Cephes library (expf).
inline Vec exp(Vec x) {
  constexpr float kRoundToInteger = 12582912.0F;  // 1.5 · 2^23: adding it leaves no fraction bits
  // NaN passes through, as the second operand.
  x = min(broadcast(89.0F), max(broadcast(-104.0F), x));
  const Vec shifted = x * 1.44269504088896341F + kRoundToInteger;
  const Vec n = shifted - kRoundToInteger;
  const Vec r = (x - n * 0.693359375F) + n * 2.12194440e-4F;
  Vec p = r * 1.9875691500e-4F + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  p = p * (r * r) + r + 1.0F;
  return scale_by_power(p, n);
}

struct SinCos {
  Vec sine;
  Vec cosine;
};

/// Sine and cosine within 1.5e-7 for |x| up to 1e8 (far beyond any position times frequency): the
/// quadrant is removed in double, and Cephes' polynomials (sinf, cosf) take |r| <= π/4.
inline SinCos sincos(Vec x) {
  constexpr double kRoundToInteger = 6755399441055744.0;  // 1.5 · 2^52
  const WideVec wide = __builtin_convertvector(x, WideVec);
  const WideVec turns = (wide * 0.636619772367581343 + kRoundToInteger) - kRoundToInteger;
  const Vec r = __builtin_convertvector(wide - turns * 1.57079632679489662, Vec);
  const IntVec quadrant = __builtin_convertvector(turns, IntVec);
  const Vec r2 = r * r;
  Vec s = r2 * -1.9515295891e-4F + 8.3321608736e-3F;
  s = (s * r2 - 1.6666654611e-1F) * (r2 * r) + r;
  Vec c = r2 * 2.443315711809948e-5F - 1.388731625493765e-3F;
  c = (c * r2 + 4.166664568298827e-2F) * (r2 * r2) - 0.5F * r2 + 1.0F;
  const IntVec swap = (quadrant & 1) != 0;
  const Vec sine = swap ? c : s;
  const Vec cosine = swap ? s : c;
  return {(quadrant & 2) != 0 ? -sine : sine, ((quadrant + 1) & 2) != 0 ? -cosine : cosine};
}

/// 1 / x for x from 1 to infinity, rounded as a division rounds it, but on AVX-512 0 above 2^126;
/// NaN stays.
inline Vec reciprocal_from_one(Vec x) {
#if defined(__AVX512F__)
  // Two steps of Newton's iteration, several times as fast as a division. The last one takes an odd
  // factor: without, 2 - 2^-23 would give the even number of two that are equally near.
  const __m512 d = __m512(x);
  const __m512 one = _mm512_set1_ps(1.0F);
  const __m512 first = _mm512_rcp14_ps(d);
  const __m512 second = _mm512_fmadd_ps(_mm512_fnmadd_ps(d, first, one), first, first);
  const __m512 odd =
      _mm512_castsi512_ps(_mm512_or_epi32(_mm512_castps_si512(second), _mm512_set1_epi32(1)));
  const __mmask16 in_range = _mm512_cmp_ps_mask(d, _mm512_set1_ps(0x1p126F), _CMP_NGT_UQ);
  return Vec(_mm512_maskz_fmadd_ps(in_range, _mm512_fnmadd_ps(d, second, one), odd, second));
#else
  return 1.0F / x;
#endif
}

/// 1 / (1 + e^-x).
inline Vec sigmoid(Vec x) {
  return reciprocal_from_one(1.0F + exp(-x));
}

}  // namespace tessera::simd
