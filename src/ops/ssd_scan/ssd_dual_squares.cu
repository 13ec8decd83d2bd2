// The products of tokens' gradients and values in a chunk, times decays and steps: summed over the
// heads of a block they give gradients of B and C; times C·B, by rows and columns, what steps need.
// Both factors are as given and sums are in F32, so what nearly vanishes stays exact.
#include "ops/ssd_scan/ssd_dual.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
static_assert(kWarps == kSsdTileRows);

struct SquaresStage {
  BFloat16 grads[kSsdRows * kSsdSliceStride];
  BFloat16 values[kSsdRows * kSsdSliceStride];
  float sums[kSsdRows];
  float steps[kSsdRows];
};
constexpr int kColumnSums = kSsdTile * kSsdTileRows * (kSsdTileRows + 1) / 2;

struct SquaresShared {
  SquaresStage stages[2];
  float products[kSsdTriangle];
  float column_sums[kColumnSums];  // of each row of tiles, those that it has

  /// Where a row of tiles has those of a column.
  __device__ __forceinline__ float& column_sum(int tile, int column) {
    return column_sums[kSsdTile * (tile * (tile + 1) / 2) + column];
  }
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
  __device__ __forceinline__ void add(SquaresShared& shared, const SquaresStage& stage) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    uint32_t a[kSsdSlice / 16][4];
#pragma unroll
    for (int k = 0; k < kSsdSlice / 16; ++k)
      load_fragment_rows(a[k], stage.grads + tile * kSsdTile * kSsdSliceStride + 16 * k,
                         kSsdSliceStride);
    const float of_rows[2] = {stage.sums[row(0)], stage.sums[row(1)]};
#pragma unroll
    for (int j = 0; j < kSsdTileRows; ++j) {
      if (j > tile) continue;
      float fresh[2][4] = {};
#pragma unroll
      for (int k = 0; k < kSsdSlice / 16; ++k) {
        uint32_t b[4];
        load_fragment_columns(b, stage.values + j * kSsdTile * kSsdSliceStride + 16 * k,
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
        const float2 sums = *reinterpret_cast<const float2*>(stage.sums + column);
        const float2 steps = *reinterpret_cast<const float2*>(stage.steps + column);
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
        shared.column_sum(tile, j * kSsdTile + i / 2 * 8 + lane % 4 * 2 + i % 2) += sum;
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
  /// A head's sums by rows, to global memory.
  __device__ __forceinline__ void write_rows(const SsdDualBackward& to, int64_t rows_at) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = sum_lanes<4>(row_sums[half]);
      const float skip = sum_lanes<4>(skips[half]);
      if (threadIdx.x % 4 == 0) {
        to.row_sums[rows_at + row(half)] = sum;
        to.skips[rows_at + row(half)] = skip;
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

/// A head's sums by columns to global memory, by the first threads; their places are cleared.
__device__ __forceinline__ void write_columns(SquaresShared& shared, const SsdDualBackward& to,
                                              int64_t rows_at) {
  if (threadIdx.x >= kSsdRows) return;
  const int column = static_cast<int>(threadIdx.x);
  float sum = 0;
  for (int tile = column / kSsdTile; tile < kSsdTileRows; ++tile) {
    sum += shared.column_sum(tile, column);
    shared.column_sum(tile, column) = 0;
  }
  to.column_sums[rows_at + column] = sum;
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
  for (int i = static_cast<int>(threadIdx.x); i < kColumnSums; i += kThreads)
    shared.column_sums[i] = 0;
  const int steps = (end - begin) * sizes.head_slices;
  const auto load = [&](int step) {
    SquaresStage& stage = shared.stages[step % 2];
    const int head = begin + step / sizes.head_slices;
    const int part = step % sizes.head_slices;
    copy_part<kSsdRows, kSsdSlice, kSsdSliceStride, kThreads>(
        stage.grads, slice_rows(x, grad, chunk, head, part));
    copy_part<kSsdRows, kSsdSlice, kSsdSliceStride, kThreads>(
        stage.values, slice_rows(x, x.x, chunk, head, part));
    copy_floats<kSsdRows, kThreads>(stage.sums, scratch.sums + chunk.rows_at(x, head));
    copy_floats<kSsdRows, kThreads>(stage.steps, scratch.steps + chunk.rows_at(x, head));
    commit_copies();
  };
  load(0);
  SquareTiles tiles;
  for (int step = 0; step < steps; ++step) {
    wait_copies<0>();
    __syncthreads();
    if (step + 1 < steps) load(step + 1);
    tiles.add(shared, shared.stages[step % 2]);
    if ((step + 1) % sizes.head_slices != 0) continue;
    const int64_t rows_at = chunk.rows_at(x, begin + step / sizes.head_slices);
    tiles.write_rows(to, rows_at);
    __syncthreads();
    write_columns(shared, to, rows_at);
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
