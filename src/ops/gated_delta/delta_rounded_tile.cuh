#pragma once

#include "ops/cuda/ptx/async_copy.cuh"
#include "ops/cuda/tile/warp_tile.cuh"
#include "ops/gated_delta/delta_exact.cuh"

namespace tessera::cuda {

/// As DeltaTile, of BF16 operands along the reduction, on tensor cores. REQUIRES a reduction by
/// whole steps of 64, and rows that begin at multiples of 16 bytes.
struct RoundedDeltaTile {
  static constexpr int kDepth = 64;
  static constexpr int kStride = kDepth + 8;  // keeps rows off each other's banks
  static constexpr int kWarpRows = 16;
  static_assert(kExactThreads / 32 * kWarpRows == kDeltaRows);

  struct Shared {
    alignas(16) BFloat16 a[kDeltaRows * kStride];
    alignas(16) BFloat16 b[kDeltaRows * kStride];
  };

  WarpTile<kWarpRows, kDeltaRows> tile;

  /// Adds a's rows from `row` on times b's from `column` on, over [first, last) of the reduction.
  /// All threads of the block take part.
  __device__ __forceinline__ void add(Shared& shared, const AlongRows<BFloat16>& a, int64_t row,
                                      const AlongRows<BFloat16>& b, int64_t column, int first,
                                      int last) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    for (int step = first; step < last; step += kDepth) {
      copy(shared.a, a, row, step);
      copy(shared.b, b, column, step);
      commit_copies();
      wait_copies<0>();
      __syncthreads();
      tile.template add<true, true, kDepth>({shared.a, kStride}, warp * kWarpRows,
                                            {shared.b, kStride}, 0);
      __syncthreads();
    }
  }

  /// Calls take(row of the tile, column of the tile, sum) for each of the thread's sums.
  template <typename Take>
  __device__ __forceinline__ void for_each(Take take) {
    const int first_row = static_cast<int>(threadIdx.x) / 32 * kWarpRows;
    tile.for_each_pair([&](int row, int column, float first, float second) {
      take(first_row + row, column, first);
      take(first_row + row, column + 1, second);
    });
  }

 private:
  static __device__ __forceinline__ void copy(BFloat16* to, const AlongRows<BFloat16>& from,
                                              int64_t row, int step) {
    constexpr int kVectors = kDepth / 8;
#pragma unroll
    for (int i = 0; i < kDeltaRows * kVectors; i += kExactThreads) {
      const int vector = i + static_cast<int>(threadIdx.x);
      const int line = vector / kVectors;
      const int at = vector % kVectors * 8;
      const bool there = row + line < from.rows;
      const BFloat16* const source =
          there ? from.data + (row + line) * from.stride + step + at : from.data;
      copy_async_or_zero(reinterpret_cast<uint4*>(to + line * kStride + at),
                         reinterpret_cast<const uint4*>(source), there);
    }
  }
};

}  // namespace tessera::cuda
