#pragma once

#include <cuda_bf16.h>

#include <cstdint>

/// Sums of wgmma and mma.sync as whole vectors of a row: four lanes have two neighbours each of
/// every eight columns.
namespace tessera::cuda {

__device__ __forceinline__ uint32_t pack_pair(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

/// Of four lanes, each with its pair of four tiles of eight columns: lane i gets all of tile i, or
/// gives it back.
__device__ __forceinline__ uint4 turn_quads(const uint4& tiles) {
  const int lane = static_cast<int>(threadIdx.x);
  const bool odd = lane % 2 != 0;
  const uint32_t first = __shfl_xor_sync(~0U, odd ? tiles.x : tiles.y, 1);
  const uint32_t second = __shfl_xor_sync(~0U, odd ? tiles.z : tiles.w, 1);
  const uint4 pairs = {odd ? first : tiles.x, odd ? tiles.y : first, odd ? second : tiles.z,
                       odd ? tiles.w : second};
  const bool high = lane % 4 >= 2;
  const uint32_t third = __shfl_xor_sync(~0U, high ? pairs.x : pairs.z, 2);
  const uint32_t fourth = __shfl_xor_sync(~0U, high ? pairs.y : pairs.w, 2);
  return {high ? third : pairs.x, high ? fourth : pairs.y, high ? pairs.z : third,
          high ? pairs.w : fourth};
}

/// A thread's pairs of a row of four tiles of sums [.., 4 j + 2 half], rounded.
__device__ __forceinline__ uint4 pack_tiles(const float* sums, int half) {
  sums += 2 * half;
  return {pack_pair(sums[0], sums[1]), pack_pair(sums[4], sums[5]), pack_pair(sums[8], sums[9]),
          pack_pair(sums[12], sums[13])};
}

}  // namespace tessera::cuda
