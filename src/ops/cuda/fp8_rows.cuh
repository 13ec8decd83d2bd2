#pragma once

#include "ops/cuda/fp8_cast.cuh"
#include "ops/cuda/fp8_rows.h"

namespace tessera::cuda {

/// Writes eight neighbours of a row and, with the 15 lanes that have the rest of 128, their scale.
/// `column` is a multiple of 8, and of 128 where the lane is of 16; each half of a warp whose lanes
/// are there calls it.
template <typename T>
__device__ __forceinline__ void store_fp8(const Fp8Rows& to, int64_t row, int column,
                                          const Pack<T, 8>& pack) {
  constexpr int kLanes = Fp8Rows::kBlock / 8;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t half = 0xFFFFU << (lane & kLanes);
  float amax = largest_in(pack, 0.0F);
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2)
    amax = fmaxf(amax, __shfl_xor_sync(half, amax, step));
  const float scale = scale_for<true>(amax);
  store(to.values + row * to.columns + column, cast<true>(pack, __frcp_rn(scale)));
  if (lane % kLanes == 0)
    to.scales[row * (to.columns / Fp8Rows::kBlock) + column / Fp8Rows::kBlock] = scale;
}

}  // namespace tessera::cuda
