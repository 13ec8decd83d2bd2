#pragma once

#include <cuda_fp8.h>

#include "ops/cuda/vector.cuh"

namespace tessera::cuda {

/// What codes of E4M3, or else E5M2, stand for.
template <bool kE4m3, int kWidth>
__device__ __forceinline__ Floats<kWidth> from_fp8(const Pack<uint8_t, kWidth>& codes,
                                                   float scale) {
  constexpr __nv_fp8_interpretation_t kType = kE4m3 ? __NV_E4M3 : __NV_E5M2;
  Floats<kWidth> values;
  if constexpr (kWidth == 1) {
    values[0] = __fmul_rn(__half2float(__nv_cvt_fp8_to_halfraw(codes.at[0], kType)), scale);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; i += 2) {
      const auto two = static_cast<__nv_fp8x2_storage_t>(codes.at[i] | codes.at[i + 1] << 8);
      const float2 pair = __half22float2(__nv_cvt_fp8x2_to_halfraw2(two, kType));
      values[i] = __fmul_rn(pair.x, scale);
      values[i + 1] = __fmul_rn(pair.y, scale);
    }
  }
  return values;
}

}  // namespace tessera::cuda
