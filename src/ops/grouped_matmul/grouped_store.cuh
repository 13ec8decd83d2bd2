#pragma once

#include <cuda_bf16.h>

#include "ops/cuda/ptx/bulk_copy.cuh"
#include "ops/grouped_matmul/grouped_kernels.h"

/// How results of grouped products leave shared memory, where tiles of tokens by kColumns BF16
/// features lie as TMA swizzles rows of this many bytes.
namespace tessera::cuda {
namespace grouped {

/// Where in a row of a tile chunk `chunk` of 8 features lies.
template <int kColumns>
__device__ __forceinline__ int swizzled_chunk(int chunk, int row) {
  static_assert(kColumns == 64 || kColumns == 32);
  return kColumns == 64 ? chunk ^ (row % 8) : chunk ^ (row / 2 % 4);
}

/// Where a tile's rows and columns go in a matrix, and how many of them exist.
struct TilePlace {
  int row;
  int num_rows;
  int column;
  int num_columns;
};

/// Stores the rows and columns that TMA would not stop at.
template <int kColumns>
__device__ __forceinline__ void store_part(__nv_bfloat16* to, int64_t stride,
                                           const __nv_bfloat16* tile, int num_rows,
                                           int num_columns) {
  constexpr int kChunks = kColumns / 8;
  constexpr int kThreads = 128;
  const int lane = static_cast<int>(threadIdx.x) % kThreads;
  const int column = lane % kChunks * 8;
#pragma unroll 1  // registers are scarce beside products
  for (int row = lane / kChunks; row < num_rows; row += kThreads / kChunks) {
    const __nv_bfloat16* from =
        tile + row * kColumns + swizzled_chunk<kColumns>(lane % kChunks, row) * 8;
    if (column + 8 <= num_columns) {
      *reinterpret_cast<uint4*>(to + row * stride + column) = *reinterpret_cast<const uint4*>(from);
    } else {
#pragma unroll 1
      for (int i = 0; column + i < num_columns; ++i) to[row * stride + column + i] = from[i];
    }
  }
}

/// Stores a tile of up to kRows tokens, for which `map` has boxes of this many by kColumns; by a
/// warpgroup. Its first thread commits and waits for what it gives to the copy
/// engine.
template <int kColumns, int kRows = kGroupedStoreRows>
__device__ __forceinline__ void store_tile(const CUtensorMap* map, __nv_bfloat16* matrix,
                                           int64_t stride, const __nv_bfloat16* tile,
                                           const TilePlace& to) {
  if (to.num_rows >= kRows && to.num_columns >= kColumns) {
    if (threadIdx.x % 128 == 0) store_box(map, tile, {to.column, to.row});
  } else {
    store_part<kColumns>(matrix + to.row * stride + to.column, stride, tile,
                         min(to.num_rows, kRows), min(to.num_columns, kColumns));
  }
}

}  // namespace grouped
}  // namespace tessera::cuda
