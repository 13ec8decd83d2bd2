#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "core/dtype.h"

/// Vector code without intrinsics: GCC's vector extensions, which the compiler lowers to whatever
/// the target has. Kernels load F32 or BF16, compute in F32 vectors, and store either.
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

inline Vec broadcast(float x) {
  return Vec{} + x;
}

inline Vec load(const float* from) {
  Vec x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

inline Vec load(const Bf16* from) {
  HalfVec halves;
  std::memcpy(&halves, from, sizeof(halves));
  return std::bit_cast<Vec>(__builtin_convertvector(halves, WordVec) << 16);
}

inline void store(float* to, Vec x) {
  std::memcpy(to, &x, sizeof(x));
}

/// Rounds to nearest even, as Bf16 does; NaN stays NaN.
inline void store(Bf16* to, Vec x) {
  const WordVec words = std::bit_cast<WordVec>(x);
  const WordVec rounded = (words + 0x7fffU + ((words >> 16) & 1U)) >> 16;
  const auto is_nan = (words & 0x7fffffffU) > 0x7f800000U;
  const HalfVec halves = __builtin_convertvector(is_nan ? (words >> 16) | 0x40U : rounded, HalfVec);
  std::memcpy(static_cast<void*>(to), &halves, sizeof(halves));
}

/// The first `count` < kLanes elements; the other lanes are `fill`.
template <typename T>
Vec load_first(const T* from, int64_t count, float fill = 0.0F) {
  Vec x = broadcast(fill);
  for (int64_t i = 0; i < count; ++i) x[i] = static_cast<float>(from[i]);
  return x;
}

template <typename T>
void store_first(T* to, Vec x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = T(x[i]);
}

/// to[i] = from[i] between any two element types.
template <typename To, typename From>
void convert(To* to, const From* from, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  for (; i < count; ++i) to[i] = To(static_cast<float>(from[i]));
}

}  // namespace tessera::simd
