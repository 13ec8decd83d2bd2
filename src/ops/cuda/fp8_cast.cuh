#pragma once

#include "core/fp8.h"
#include "ops/cuda/fp8_values.cuh"
#include "ops/power_scale.h"

/// Casts to E4M3, or else E5M2, with scales that are powers of two.
namespace tessera::cuda {

/// By two, as the processor casts them.
template <bool kE4m3, int kWidth>
__device__ __forceinline__ Pack<uint8_t, kWidth> to_fp8(const Floats<kWidth>& values) {
  constexpr __nv_fp8_interpretation_t kType = kE4m3 ? __NV_E4M3 : __NV_E5M2;
  Pack<uint8_t, kWidth> codes;
  if constexpr (kWidth == 1) {
    codes.at[0] = __nv_cvt_float_to_fp8(values[0], __NV_SATFINITE, kType);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; i += 2) {
      const uint16_t two =
          __nv_cvt_float2_to_fp8x2({values[i], values[i + 1]}, __NV_SATFINITE, kType);
      codes.at[i] = static_cast<uint8_t>(two);
      codes.at[i + 1] = static_cast<uint8_t>(two >> 8);
    }
  }
  return codes;
}

template <bool kE4m3>
__device__ __forceinline__ float scale_for(float amax) {
  if constexpr (kE4m3) return power_scale<E4m3>(amax);
  return power_scale<E5m2>(amax);
}

template <typename T, int kWidth>
__device__ __forceinline__ float largest_in(const Pack<T, kWidth>& pack, float before) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) before = fmaxf(before, fabsf(static_cast<float>(pack.at[i])));
  return before;
}

/// Multiplied by `factor`.
template <bool kE4m3, typename T, int kWidth>
__device__ __forceinline__ Pack<uint8_t, kWidth> cast(const Pack<T, kWidth>& pack, float factor) {
  Floats<kWidth> scaled;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) scaled[i] = __fmul_rn(static_cast<float>(pack.at[i]), factor);
  return to_fp8<kE4m3>(scaled);
}

}  // namespace tessera::cuda
