#pragma once

#include "ops/cuda/column_sums.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/vector.cuh"

namespace tessera::cuda {

/// Writes a block's sums of columns: thread `group · lanes + lane` has those of vector `lane`, and
/// the groups are added in order. `shared` has room for kWidth floats of every thread. All threads
/// must call; `to` is where the block's first column goes, `cols` how many it has.
template <int kWidth>
__device__ __forceinline__ void write_block_sums(float* to, int cols, const Floats<kWidth>& sums,
                                                 int lanes, float* shared) {
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWidth; ++i) shared[threadIdx.x * kWidth + i] = sums[i];
  __syncthreads();
  const int group_floats = lanes * kWidth;
  const int end = static_cast<int>(blockDim.x) * kWidth;
  for (int column = static_cast<int>(threadIdx.x); column < cols; column += blockDim.x) {
    float total = 0;
    for (int at = column; at < end; at += group_floats) total += shared[at];
    to[column] = total;
  }
}

constexpr int kColumnThreads = 512;
constexpr int kColumnRows = 4;        // that a thread loads at once
constexpr int kMaxColumnLanes = 256;  // vectors of a row that a block sums up

/// A block's sums over its rows of what Terms adds: load(row, column) gives what is read for kWidth
/// columns, and add(loaded, sums) adds it.
template <int kWidth, typename Terms>
__global__ void __launch_bounds__(kColumnThreads)
    sum_columns(const __grid_constant__ Terms terms, RowCount rows, int64_t cols, int lanes,
                float* partials) {
  wait_for_earlier();
  __shared__ float shared[kColumnThreads * kWidth];
  const int64_t num_rows = rows.in_use();
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const int groups = kColumnThreads / lanes;
  const int64_t first_column = static_cast<int64_t>(blockIdx.y) * lanes * kWidth;
  const int64_t column = first_column + lane * kWidth;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * groups;
  let_next_begin();
  Floats<kWidth> sums = {};
  int64_t row = static_cast<int64_t>(blockIdx.x) * groups + threadIdx.x / lanes;
  for (; row < num_rows && column < cols; row += kColumnRows * stride) {
    typename Terms::Loaded loaded[kColumnRows];
#pragma unroll
    for (int r = 0; r < kColumnRows; ++r) {
      const int64_t at = row + r * stride;
      if (at < num_rows) loaded[r] = terms.load(at, column);
    }
#pragma unroll
    for (int r = 0; r < kColumnRows; ++r) {
      if (row + r * stride < num_rows) terms.add(loaded[r], sums);
    }
  }
  const int64_t left = cols - first_column;
  const int own = static_cast<int>(left < lanes * kWidth ? left : lanes * kWidth);
  write_block_sums(partials + blockIdx.x * cols + first_column, own, sums, lanes, shared);
}

/// Adds to the accumulator [cols] the sum over rows of what Terms adds. `partials` has
/// column_sums_bytes.
template <int kWidth, typename Terms>
void launch_sum_columns(const Terms& terms, const RowCount& rows, int64_t cols,
                        Accumulator accumulator, float* partials, int num_sms,
                        cudaStream_t stream) {
  if (rows.bound == 0 || cols == 0) return;
  const int64_t row_vectors = divide_up(cols, kWidth);
  int lanes = 1;
  while (lanes < row_vectors && lanes < kMaxColumnLanes) lanes *= 2;
  const int64_t slabs = divide_up(row_vectors, lanes);
  const int64_t wanted = divide_up(rows.bound, kColumnRows * (kColumnThreads / lanes));
  constexpr int kBlocks = kWidth == 1 ? 4 : 2;  // of an SM; measured
  const int64_t resident = std::max<int64_t>(kBlocks * num_sms / slabs, 1);
  const int64_t blocks = std::min({wanted, resident, max_column_blocks(cols)});
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(slabs));
  launch_early(sum_columns<kWidth, Terms>, {grid, kColumnThreads}, stream, terms, rows, cols, lanes,
               partials);
  launch_add_partials(accumulator, partials, static_cast<int>(blocks), cols, stream);
}

}  // namespace tessera::cuda
