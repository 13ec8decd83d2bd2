#pragma once

#include <cuda_bf16.h>

#include "ops/cuda/divider.h"
#include "ops/cuda/ptx/bulk_copy.cuh"

/// Rows of tokens that a product reads where they lie, gathered on the way to shared memory.
///
/// TMA cannot gather, and what threads copy reaches their own block only: forwarding it
/// to the cluster's other block takes longer than the products. So where a product gathers, the
/// blocks of a cluster share the other operand, and each gathers tokens that it alone multiplies:
/// two warps copy them to where TMA would have put them, without waiting, and the
/// stage's `full` counts their copies besides TMA's bytes.
namespace tessera::cuda {

constexpr int kFirstGatherWarp = 2;  // of the warpgroup that feeds the products
constexpr int kGatherWarps = 2;
constexpr int kLanes = 32;
constexpr int kGatherArrivals = kGatherWarps * kLanes;
constexpr int kPieceValues = 64;  // of a row that fill 128 bytes of a tile

/// Which rows a warp copies: fours of rows, every second one. `idx` counts them.
__device__ __forceinline__ int row_of_warp(int warp, int idx) {
  return idx / 4 * (4 * kGatherWarps) + warp * 4 + idx % 4;
}

/// What the map has for a warp's kRows rows, negative where a row is zero. Eight lanes hold those
/// that they copy: lane l rows l % 8 * 4 + l / 8, and so on every 32.
template <int kRows>
struct SourcesOfRows {
  static_assert(kRows % kLanes == 0);
  int at[kRows / kLanes];
};

/// Those of rows [first, first + num_rows), the rest negative; not waited for. Params has what is
/// gathered: see GroupedRowsParams.
template <int kRows, typename Params>
__device__ __forceinline__ SourcesOfRows<kRows> load_sources(const Params& params, int first,
                                                             int num_rows, int warp) {
  SourcesOfRows<kRows> sources;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
#pragma unroll
  for (int i = 0; i < kRows / kLanes; ++i) {
    const int row = row_of_warp(warp, i * kLanes + lane % 8 * 4 + lane / 8);
    const bool is_row = row < num_rows && first + row < params.num_source;
    sources.at[i] = is_row ? __ldg(params.source + first + row) : -1;
  }
  return sources;
}

/// Where the rows lie of which a lane copies 16 bytes each, 8 lanes a row: counted in 16 bytes.
template <int kRows>
struct PlacesOfRows {
  static constexpr uint32_t kNone = ~0U;  // zeros
  uint32_t at[kRows / 4];
};

/// By a warp; waits for the sources. All at once and long before the copies, each of which would
/// wait for its own.
template <int kRows>
__device__ __forceinline__ PlacesOfRows<kRows> places_of(const SourcesOfRows<kRows>& sources,
                                                         const Divider& top_k, int num_columns) {
  PlacesOfRows<kRows> places;
  const uint32_t row_chunks = static_cast<uint32_t>(num_columns) / 8;
#pragma unroll
  for (int i = 0; i < kRows / kLanes; ++i) {
    const int source = sources.at[i];
    const uint32_t token = top_k.quotient(static_cast<uint32_t>(max(source, 0)));
    const uint32_t place = source < 0 ? PlacesOfRows<kRows>::kNone : token * row_chunks;
#pragma unroll
    for (int lane = 0; lane < 8; ++lane) places.at[i * 8 + lane] = __shfl_sync(~0u, place, lane, 8);
  }
  return places;
}

__device__ __forceinline__ const char* place_address(const char* from, uint32_t place) {
  const char* address;
  asm volatile("mad.wide.u32 %0, %1, 16, %2;" : "=l"(address) : "r"(place), "l"(from));
  return address;
}

/// Starts to copy a warp's rows of at least the first num_rows to tiles of kTileRows rows swizzled
/// over 128 bytes, one for each piece of 64 values from `from` on, the first token's; of these
/// values num_columns exist. What does not exist is zero.
template <int kPieces, int kTileRows, int kRows>
__device__ __forceinline__ void copy_rows(__nv_bfloat16* tiles, const __nv_bfloat16* from,
                                          int num_columns, const PlacesOfRows<kRows>& places,
                                          int num_rows, int warp) {
  static_assert(kGatherWarps == 2, "a warp's rows have one place each in the swizzled eights");
  constexpr int kAtOnce = 4;  // addresses that are made before their copies
  constexpr int kTileBytes = kTileRows * 128;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int chunk = lane % 8;
  const int row = row_of_warp(warp, lane / 8);
  const uint32_t to = shared_address(tiles) + row * 128 + (chunk ^ row) * 16;
  const char* const source = reinterpret_cast<const char*>(from + chunk * 8);
#pragma unroll
  for (int first = 0; first < kRows / 4; first += kAtOnce) {
    if (first * 8 >= num_rows) break;
    const char* address[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) address[i] = place_address(source, places.at[first + i]);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        const bool is_there = places.at[first + i] != PlacesOfRows<kRows>::kNone &&
                              piece * kPieceValues + chunk * 8 < num_columns;
        copy_16_bytes(to + (first + i) * 1024 + piece * kTileBytes, address[i] + piece * 128,
                      is_there);
      }
    }
  }
}

}  // namespace tessera::cuda
