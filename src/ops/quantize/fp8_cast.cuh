#pragma once

#include <cuda_fp8.h>

#include "ops/cuda/vector.cuh"
#include "ops/round_values/round_math.h"

/// Casts to E4M3, or else E5M2, with scales that are powers of two.
namespace tessera::cuda {

template <bool kE4m3>
__device__ __forceinline__ uint8_t to_fp8(float value) {
  return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, kE4m3 ? __NV_E4M3 : __NV_E5M2);
}

template <bool kE4m3>
__device__ __forceinline__ float scale_for(float amax) {
  if constexpr (kE4m3) return scale_of_block<E4m3>(amax, 1.0F, false);
  return scale_of_block<E5m2>(amax, 1.0F, false);
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
  Pack<uint8_t, kWidth> codes;
#pragma unroll
  for (int i = 0; i < kWidth; ++i)
    codes.at[i] = to_fp8<kE4m3>(__fmul_rn(static_cast<float>(pack.at[i]), factor));
  return codes;
}

}  // namespace tessera::cuda
