#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "ops/grouped_matmul/grouped_pipeline.cuh"

/// What kernels that put an activation behind a grouped product keep of a tile, and how they take
/// 32 tokens after the other from it.
namespace tessera::cuda {
namespace grouped {

/// A tile's products as a thread keeps them: BF16, in the accumulators' order (WarpgroupProduct),
/// the first tokens that are not stored yet in front. Tiles of fewer than kMaxTokens leave
/// registers for what is done with the results.
template <int kTileTokens>
struct KeptTile {
  uint32_t packed[kTileTokens / 4];
  float prob;  // of token `lane` of those in front
};

__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(two);
}
__device__ __forceinline__ float2 unpack(uint32_t two) {
  return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(two));
}

/// Gates, ups (or their gradients) and activations of the tokens that one step stores, in shared
/// memory.
template <int kFeatures>
struct ActivatedTiles {
  Value gate[kStoreTokens * kFeatures];
  Value up[kStoreTokens * kFeatures];
  Value act[kStoreTokens * kFeatures];
};

template <int kColumns, int kTileTokens>
__device__ __forceinline__ void keep_tile(KeptTile<kTileTokens>& kept,
                                          const float (&d)[kColumns / 2]) {
#pragma unroll
  for (int i = 0; i < kColumns / 4; ++i) kept.packed[i] = pack(d[2 * i], d[2 * i + 1]);
}

/// This thread's lane, and its warp of the warpgroup; see read_thread.
__device__ __forceinline__ int read_lane() {
  return read_thread() % 32;
}
__device__ __forceinline__ int read_warp() {
  return read_thread() / 32 % 4;
}
__device__ __forceinline__ bool is_leader() {
  return read_thread() % kWarpgroup == 0;
}

/// After the first kTokens in front have been stored. So one code serves all parts of a tile:
/// registers have no index.
template <int kTokens, int kTileTokens>
__device__ __forceinline__ void drop_stored(KeptTile<kTileTokens>& kept) {
  constexpr int kStored = kTokens / 4;
#pragma unroll
  for (int i = kStored; i < kTileTokens / 4; ++i) kept.packed[i - kStored] = kept.packed[i];
}

/// The probability of the tile's row `first` + lane; 1 where there are none.
__device__ __forceinline__ float load_prob(const float* probs, const Place& place, int first) {
  const int row = first + read_lane();
  if (probs == nullptr) return 1.0F;
  return row < place.num_rows ? __ldg(probs + place.row + row) : 0.0F;
}

/// Of the two tokens of group `eight` that this thread's accumulators are of.
__device__ __forceinline__ float2 probs_of(float prob, int lane, int eight) {
  const int token = eight * 8 + lane % 4 * 2;
  return {__shfl_sync(~0u, prob, token), __shfl_sync(~0u, prob, token + 1)};
}

/// Four matrices of 8 tokens by 8 features, as accumulators hold them, to or from the rows of
/// tokens that lanes give the addresses of: those of matrix i lanes 8 i to 8 i + 7.
__device__ __forceinline__ void store_matrices(Value* row, uint32_t a, uint32_t b, uint32_t c,
                                               uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(row)),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], const Value* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}

}  // namespace grouped
}  // namespace tessera::cuda
