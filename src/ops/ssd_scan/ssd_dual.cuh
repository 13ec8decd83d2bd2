#pragma once

#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/ptx/async_copy.cuh"
#include "ops/cuda/ptx/fast_exp.cuh"
#include "ops/cuda/tile/row_quads.cuh"
#include "ops/cuda/tile/warp_tile.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/ssd_scan/ssd_dual.h"

/// What the kernels of the dual form share.
namespace tessera::cuda {

constexpr int kSsdPadding = 8;  // of rows in shared memory
constexpr int kSsdSliceStride = kSsdSlice + kSsdPadding;

__device__ __forceinline__ const BFloat16* bf16(const void* data) {
  return static_cast<const BFloat16*>(data);
}
__device__ __forceinline__ BFloat16* bf16(void* data) {
  return static_cast<BFloat16*>(data);
}

inline SsdDualSizes sizes_of(const SsdRows& x) {
  return ssd_dual_sizes(x.tokens, x.heads, x.groups, x.head_size, x.state_size);
}

/// Rows [begin, begin + count) of the packed tokens.
struct SsdChunk {
  int idx;
  int begin;
  int count;

  __device__ __forceinline__ SsdChunk(const SsdRows& x, int chunk)
      : idx(chunk), begin(chunk * kSsdRows), count(min(kSsdRows, x.tokens - chunk * kSsdRows)) {}
  /// Whether a sequence begins in it, so that the state before is not that behind.
  __device__ __forceinline__ bool has_start(const SsdDual& scratch) const {
    return scratch.starts[begin + count - 1] >= begin;
  }
  /// Where a head's rows of chunks lie.
  __device__ __forceinline__ int64_t rows_at(const SsdRows& x, int head) const {
    return (static_cast<int64_t>(idx) * x.heads + head) * kSsdRows;
  }
};

/// Part of a matrix in global memory: rows `stride` values apart, of which there are `rows`, of
/// `columns` values, a multiple of 8.
struct SsdPart {
  const BFloat16* data;
  int64_t stride;
  int rows;
  int columns;
};

/// A chunk's rows of a group's vectors [T,G,N].
__device__ __forceinline__ SsdPart group_rows(const SsdRows& x, const void* vectors,
                                              const SsdChunk& chunk, int group) {
  const int64_t stride = static_cast<int64_t>(x.groups) * x.state_size;
  return {bf16(vectors) + chunk.begin * stride + static_cast<int64_t>(group) * x.state_size, stride,
          chunk.count, x.state_size};
}

/// A chunk's rows of a slice of values [T,H,P].
__device__ __forceinline__ SsdPart slice_rows(const SsdRows& x, const void* values,
                                              const SsdChunk& chunk, int head, int part) {
  const int64_t stride = static_cast<int64_t>(x.heads) * x.head_size;
  return {bf16(values) + chunk.begin * stride + static_cast<int64_t>(head) * x.head_size +
              part * kSsdSlice,
          stride, chunk.count, min(kSsdSlice, x.head_size - part * kSsdSlice)};
}

/// Calls take(row, column) for the vectors of kRows by kColumns that are the thread's.
template <int kRows, int kColumns, int kThreads, typename Take>
__device__ __forceinline__ void for_own_vectors(Take take) {
  constexpr int kVectors = kColumns / 8;
  static_assert(kThreads % kVectors == 0 && kRows % (kThreads / kVectors) == 0);
  const int column = static_cast<int>(threadIdx.x) % kVectors * 8;
  const int first = static_cast<int>(threadIdx.x) / kVectors;
#pragma unroll
  for (int row = 0; row < kRows; row += kThreads / kVectors) take(first + row, column);
}

/// Starts to copy a part to kRows by kColumns in shared memory, rows kStride apart, with zeros
/// around it.
template <int kRows, int kColumns, int kStride, int kThreads>
__device__ __forceinline__ void copy_part(BFloat16* to, const SsdPart& from) {
  for_own_vectors<kRows, kColumns, kThreads>([&](int row, int column) {
    const bool there = row < from.rows && column < from.columns;
    copy_async_or_zero(to + row * kStride + column,
                       there ? from.data + row * from.stride + column : from.data, there);
  });
}

/// The same to tiles of 64 values a row, swizzled as wgmma reads them (describe_tile).
template <int kRows, int kThreads>
__device__ __forceinline__ void copy_swizzled(BFloat16* to, const SsdPart& from) {
  for_own_vectors<kRows, kSsdSlice, kThreads>([&](int row, int column) {
    const bool there = row < from.rows && column < from.columns;
    copy_async_or_zero(to + row * kSsdSlice + (column ^ row % 8 * 8),
                       there ? from.data + row * from.stride + column : from.data, there);
  });
}

/// Starts to copy kCount values, a multiple of 4 for each thread.
template <int kCount, int kThreads>
__device__ __forceinline__ void copy_floats(float* to, const float* from) {
#pragma unroll
  for (int i = 0; i < kCount / 4; i += kThreads) {
    const int at = i + static_cast<int>(threadIdx.x);
    if (kCount / 4 % kThreads == 0 || at < kCount / 4)
      copy_async_or_zero(reinterpret_cast<float4*>(to) + at,
                         reinterpret_cast<const float4*>(from) + at, true);
  }
}

/// Of a lane, in a tile of squares: half h has the columns 8 h on, of two rows eight apart two
/// neighbours each.
__device__ __forceinline__ int tile_at(int row_tile, int column_tile, int half) {
  return (row_tile * (row_tile + 1) / 2 + column_tile) * kSsdTileValues + half * 128 +
         static_cast<int>(threadIdx.x) % 32 * 4;
}

/// exp(L_to - L_from) of logarithms to base 2, at most 1: what is later is masked elsewhere.
__device__ __forceinline__ float decay_between(float to, float from) {
  return fast_exp2(fminf(to - from, 0.0F));
}

/// Calls run.operator()<kRows>() with the rows of states.
template <typename Run>
void with_state_rows(const SsdDualSizes& sizes, Run run) {
  sizes.state_rows == 64 ? run.template operator()<64>() : run.template operator()<128>();
}

template <typename... Params, typename... Args>
void launch_dual(void (*kernel)(Params...), dim3 blocks, int threads, size_t shared_bytes,
                 cudaStream_t stream, const Args&... args) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared_bytes)));
  launch_early(kernel, {blocks, static_cast<unsigned>(threads), shared_bytes}, stream, args...);
}

}  // namespace tessera::cuda
