// The products of tokens' gradients and values in a chunk, times decays and steps: summed over the
// heads of a block they give gradients of B and C; times C·B, by rows and columns, what steps need.
// Both factors are as given and sums are in F32, so what nearly vanishes stays exact.
#include "ops/ssd_scan/ssd_dual.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
static_assert(kWarps == kSsdTileRows);

struct SquaresShared {
  BFloat16 grads[kSsdRows * kSsdSliceStride];
  BFloat16 values[kSsdRows * kSsdSliceStride];
  float products[kSsdTriangle];
  float sums[kSsdRows];
  float steps[kSsdRows];
  float row_sums[kSsdRows];
  float skips[kSsdRows];
  float column_sums[kWarps][kSsdRows];  // of each warp's rows
};

/// Sums over the eight lanes that share columns: of value i to the lane whose lane / 4 is 2 i.
__device__ __forceinline__ float sum_columns(const float (&values)[4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool high = (lane & 16) != 0;
  const float first = high ? values[2] : values[0];
  const float second = high ? values[3] : values[1];
  const float a = first + __shfl_xor_sync(~0U, high ? values[0] : values[2], 16);
  const float b = second + __shfl_xor_sync(~0U, high ? values[1] : values[3], 16);
  const bool odd = (lane & 8) != 0;
  const float sum = (odd ? b : a) + __shfl_xor_sync(~0U, odd ? a : b, 8);
  return sum + __shfl_xor_sync(~0U, sum, 4);
}

/// A warp's row of tiles.
struct SquareTiles {
  float total[kSsdTileRows][2][4] = {};
  float row_sums[2] = {};  // of this thread's two rows
  float skips[2] = {};
  int tile;

  /// So that the warps of each quarter of an SM have as much to do as those of the others.
  __device__ __forceinline__ SquareTiles() {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    tile = warp < kWarps / 2 ? warp : kWarps + kWarps / 2 - 1 - warp;
  }
  __device__ __forceinline__ int row(int half) const {
    return tile * kSsdTile + half * 8 + static_cast<int>(threadIdx.x) % 32 / 4;
  }

  /// Of one slice.
  __device__ __forceinline__ void add(SquaresShared& shared) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    uint32_t a[kSsdSlice / 16][4];
#pragma unroll
    for (int k = 0; k < kSsdSlice / 16; ++k)
      load_fragment_rows(a[k], shared.grads + tile * kSsdTile * kSsdSliceStride + 16 * k,
                         kSsdSliceStride);
    const float of_rows[2] = {shared.sums[row(0)], shared.sums[row(1)]};
#pragma unroll
    for (int j = 0; j < kSsdTileRows; ++j) {
      if (j > tile) continue;
      float fresh[2][4] = {};
#pragma unroll
      for (int k = 0; k < kSsdSlice / 16; ++k) {
        uint32_t b[4];
        load_fragment_columns(b, shared.values + j * kSsdTile * kSsdSliceStride + 16 * k,
                              kSsdSliceStride);
        fragment_product(fresh[0], a[k], b[0], b[1]);
        fragment_product(fresh[1], a[k], b[2], b[3]);
      }
      if (j == tile) add_skips(fresh);
      float of_columns[4] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = j * kSsdTile + half * 8 + lane % 4 * 2;
        const float4 four =
            *reinterpret_cast<const float4*>(shared.products + tile_at(tile, j, half));
        const float product[4] = {four.x, four.y, four.z, four.w};
        const float2 sums = *reinterpret_cast<const float2*>(shared.sums + column);
        const float2 steps = *reinterpret_cast<const float2*>(shared.steps + column);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float decay = decay_between(of_rows[e / 2], e % 2 == 0 ? sums.x : sums.y);
          const float value = fresh[half][e] * decay * (e % 2 == 0 ? steps.x : steps.y);
          total[j][half][e] += value;
          const float z = product[e] * value;
          row_sums[e / 2] += z;
          of_columns[2 * half + e % 2] += z;
        }
      }
      const float sum = sum_columns(of_columns);
      if (lane / 4 % 2 == 0) {
        const int i = lane / 8;  // which of the four columns
        shared.column_sums[tile][j * kSsdTile + i / 2 * 8 + lane % 4 * 2 + i % 2] += sum;
      }
    }
  }
  __device__ __forceinline__ void add_skips(const float (&fresh)[2][4]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (lane / 4 == lane % 4 * 2 + e) skips[half] += fresh[half][2 * half + e];
      }
    }
  }
  /// Leaves a head's sums by rows in shared memory.
  __device__ __forceinline__ void give_rows(SquaresShared& shared) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = sum_lanes<4>(row_sums[half]);
      const float skip = sum_lanes<4>(skips[half]);
      if (threadIdx.x % 4 == 0) {
        shared.row_sums[row(half)] = sum;
        shared.skips[row(half)] = skip;
      }
      row_sums[half] = 0;
      skips[half] = 0;
    }
  }
  __device__ __forceinline__ void write(float* to) const {
#pragma unroll
    for (int j = 0; j < kSsdTileRows; ++j) {
      if (j > tile) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float(&own)[4] = total[j][half];
        *reinterpret_cast<float4*>(to + tile_at(tile, j, half)) = {own[0], own[1], own[2], own[3]};
      }
    }
  }
};

/// A head's sums to global memory, by the first threads; their places are cleared for the next.
__device__ __forceinline__ void write_sums(SquaresShared& shared, const SsdDualBackward& to,
                                           int64_t rows_at) {
  if (threadIdx.x >= kSsdRows) return;
  const int row = static_cast<int>(threadIdx.x);
  float sum = 0;
#pragma unroll
  for (int tile = 0; tile < kWarps; ++tile) {
    sum += shared.column_sums[tile][row];
    shared.column_sums[tile][row] = 0;
  }
  to.column_sums[rows_at + row] = sum;
  to.row_sums[rows_at + row] = shared.row_sums[row];
  to.skips[rows_at + row] = shared.skips[row];
}

__global__ void __launch_bounds__(kThreads, 2)
    sum_squares(const __grid_constant__ SsdRows x, SsdDual scratch, SsdDualSizes sizes,
                SsdDualBackward to, const void* grad) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<SquaresShared*>(memory);
  wait_for_earlier();
  const SsdChunk chunk(x, static_cast<int>(blockIdx.x));
  const int group = static_cast<int>(blockIdx.y) / sizes.head_blocks;
  const int first = static_cast<int>(blockIdx.y) % sizes.head_blocks * kSsdHeadBlock;
  const int begin = group * sizes.group_heads + first;
  const int end = begin + min(kSsdHeadBlock, sizes.group_heads - first);
  copy_floats<kSsdTriangle, kThreads>(
      shared.products,
      scratch.products + (static_cast<int64_t>(chunk.idx) * x.groups + group) * kSsdTriangle);
  for (int i = static_cast<int>(threadIdx.x); i < kWarps * kSsdRows; i += kThreads)
    (&shared.column_sums[0][0])[i] = 0;
  SquareTiles tiles;
  for (int head = begin; head < end; ++head) {
    const int64_t rows_at = chunk.rows_at(x, head);
    for (int part = 0; part < sizes.head_slices; ++part) {
      __syncthreads();
      copy_part<kSsdRows, kSsdSlice, kSsdSliceStride, kThreads>(
          shared.grads, slice_rows(x, grad, chunk, head, part));
      copy_part<kSsdRows, kSsdSlice, kSsdSliceStride, kThreads>(
          shared.values, slice_rows(x, x.x, chunk, head, part));
      copy_floats<kSsdRows, kThreads>(shared.sums, scratch.sums + rows_at);
      copy_floats<kSsdRows, kThreads>(shared.steps, scratch.steps + rows_at);
      commit_copies();
      wait_copies<0>();
      __syncthreads();
      tiles.add(shared);
    }
    tiles.give_rows(shared);
    __syncthreads();
    write_sums(shared, to, rows_at);
  }
  tiles.write(to.squares +
              (static_cast<int64_t>(chunk.idx) * sizes.all_blocks + blockIdx.y) * kSsdTriangle);
}

}  // namespace

void launch_ssd_dual_squares(const SsdRows& x, const SsdDual& scratch,
                             const SsdDualBackward& backward, const void* grad,
                             cudaStream_t stream) {
  const SsdDualSizes sizes = sizes_of(x);
  launch_dual(sum_squares,
              dim3(static_cast<unsigned>(sizes.chunks), static_cast<unsigned>(sizes.all_blocks)),
              kThreads, sizeof(SquaresShared), stream, x, scratch, sizes, backward, grad);
}

}  // namespace tessera::cuda
