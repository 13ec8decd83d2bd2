#pragma once

#include <cuda_bf16.h>

#include "ops/cuda/bulk_copy.cuh"

/// Rows of tokens that a product reads where they lie, gathered on the way to shared memory.
///
/// The copy engine cannot gather, and what threads copy reaches their own block only. So each block
/// of a cluster gathers one half of what both need and forwards it to the other: the L2 cache is
/// read once for both, as with the copy engine's multicast. One warp copies its block's half of
/// each stage to where the copy engine would have put it, without waiting: the stage's `landed`
/// counts what is there. Then another warp sends the half to the same place of the other block,
/// whose `full` counts the bytes. A place is free for the next turn when both blocks' products have
/// read it, as `empty` counts; by then the forwarded half has been read too, since the other block
/// multiplied it.
namespace tessera::cuda {

constexpr int kGatherWarp = 2;    // of the warpgroup that feeds the products
constexpr int kForwardWarp = 3;   // its first thread
constexpr int kLanes = 32;        // arrive at `landed`
constexpr int kPieceValues = 64;  // of a row that fill 128 bytes of a tile

/// Which of the tokens some rows of a tile are: this lane of a warp holds those of rows lane, lane
/// + 32 and so on, and all lanes which of each 32 rows are any, the others being zero.
template <int kRows>
struct TokensOfRows {
  static_assert(kRows % kLanes == 0);
  uint32_t at[kRows / kLanes];
  uint32_t exist[kRows / kLanes];
};

/// What the map has for rows lane, lane + 32 and so on, negative where a row is zero.
template <int kRows>
struct SourcesOfRows {
  int at[kRows / kLanes];
};

/// Those of rows [first, first + num_rows), the rest negative; not waited for. Params has what is
/// gathered: see GroupedRowsParams.
template <int kRows, typename Params>
__device__ __forceinline__ SourcesOfRows<kRows> load_sources(const Params& params, int first,
                                                             int num_rows) {
  SourcesOfRows<kRows> sources;
#pragma unroll
  for (int i = 0; i < kRows / kLanes; ++i) {
    const int row = static_cast<int>(threadIdx.x) % kLanes + i * kLanes;
    const bool is_row = row < num_rows && first + row < params.num_source;
    sources.at[i] = is_row ? __ldg(params.source + first + row) : -1;
  }
  return sources;
}

/// By a warp; waits for the sources.
template <int kRows>
__device__ __forceinline__ TokensOfRows<kRows> tokens_of(const SourcesOfRows<kRows>& sources,
                                                         int top_k) {
  TokensOfRows<kRows> tokens;
#pragma unroll
  for (int i = 0; i < kRows / kLanes; ++i) {
    tokens.at[i] = static_cast<uint32_t>(max(sources.at[i], 0)) / static_cast<uint32_t>(top_k);
    tokens.exist[i] = __ballot_sync(~0u, sources.at[i] >= 0);
  }
  return tokens;
}

/// Where a row's values lie: kPieces pieces of 64 from `from` on, of which `num_columns` exist.
struct GatheredColumns {
  const __nv_bfloat16* from;  // in the first token's row
  int num_columns;
  uint32_t row_bytes;  // from one token's row to the next
};

__device__ __forceinline__ const char* row_address(const char* from, uint32_t token,
                                                   uint32_t row_bytes) {
  const char* address;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(address) : "r"(token), "r"(row_bytes), "l"(from));
  return address;
}

/// Starts to copy the first num_rows rows, a multiple of 8, to tiles of kTileRows rows swizzled
/// over 128 bytes, one for each piece; by a warp. What does not exist is zero.
template <int kPieces, int kTileRows, int kRows>
__device__ __forceinline__ void copy_rows(__nv_bfloat16* tiles, const GatheredColumns& columns,
                                          const TokensOfRows<kRows>& tokens, int num_rows) {
  constexpr int kAtOnce = 8;  // copies of four rows, 8 lanes a row
  constexpr int kTileBytes = kTileRows * 128;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int chunk = lane % 8;
  const uint32_t to = shared_address(tiles) + lane / 8 * 128;
  const uint32_t swizzled[2] = {to + (chunk ^ (lane / 8)) * 16, to + (chunk ^ (lane / 8 + 4)) * 16};
  const char* const from = reinterpret_cast<const char*>(columns.from + chunk * 8);
#pragma unroll
  for (int part = 0; part < kRows / kLanes; ++part) {
    const int rows_left = num_rows - part * kLanes - lane / 8;
    if (num_rows <= part * kLanes) break;
    const uint32_t exist = tokens.exist[part] >> (lane / 8);
    const char* source[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      source[i] =
          row_address(from, __shfl_sync(~0u, tokens.at[part], i * 4 + lane / 8), columns.row_bytes);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (i * 4 >= rows_left) continue;
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        const bool is_there =
            (exist & 1u << i * 4) != 0 && piece * kPieceValues + chunk * 8 < columns.num_columns;
        copy_16_bytes(swizzled[i % 2] + (part * kAtOnce + i) * 512 + piece * kTileBytes,
                      source[i] + piece * 128, is_there);
      }
    }
  }
}

/// Gives what has landed at `place` to the products of this block and to those of the other one; by
/// one thread.
__device__ __forceinline__ void forward(void* place, uint32_t num_bytes, Barrier* full,
                                        uint32_t rank) {
  fence_shared_for_async();
  if (num_bytes > 0) forward_bytes(place, num_bytes, full, rank ^ 1);
  full->arrive();
}

}  // namespace tessera::cuda
