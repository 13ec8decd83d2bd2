#include "ops/cuda/column_sums.h"

#include <algorithm>

#include "ops/cuda/column_sums.cuh"

namespace tessera::cuda {
namespace {

constexpr int kWarps = 32;  // that share the partial sums of 32 columns

// Each warp adds every 32nd partial, and the first warp adds the warps' sums.
__global__ void __launch_bounds__(32 * kWarps)
    add_partials(float* accumulator, const float* partials, int num_partials, int64_t cols) {
  __shared__ float sums[kWarps][33];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * 32 + lane;
  float total = 0;
  if (column < cols) {
#pragma unroll 8
    for (int i = warp; i < num_partials; i += kWarps) total += partials[i * cols + column];
  }
  sums[warp][lane] = total;
  __syncthreads();
  // Transposed: warp w reduces column w.
  const float all = sum_lanes(sums[lane][warp]);
  const int64_t own = static_cast<int64_t>(blockIdx.x) * 32 + warp;
  if (lane == 0 && own < cols) accumulator[own] += all;
}

constexpr int kThreads = 512;
constexpr int kRows = 8;  // that a thread loads at once
constexpr int kMaxLanes = 256;

template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    sum_columns(const T* x, RowCount rows, int64_t cols, int lanes, float* partials) {
  __shared__ float shared[kThreads * kWidth];
  const int64_t num_rows = rows.in_use();
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const int groups = kThreads / lanes;
  const int64_t first_column = static_cast<int64_t>(blockIdx.y) * lanes * kWidth;
  const int64_t column = first_column + lane * kWidth;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * groups;
  Floats<kWidth> sums = {};
  int64_t row = static_cast<int64_t>(blockIdx.x) * groups + threadIdx.x / lanes;
  for (; row < num_rows && column < cols; row += kRows * stride) {
    Pack<T, kWidth> values[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t at = row + r * stride;
      if (at < num_rows) values[r] = load_pack<kWidth>(x + at * cols + column);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row + r * stride >= num_rows) continue;
      const Floats<kWidth> terms = to_floats(values[r]);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sums[i] += terms[i];
    }
  }
  const int64_t left = cols - first_column;
  const int own = static_cast<int>(left < lanes * kWidth ? left : lanes * kWidth);
  write_block_sums(partials + blockIdx.x * cols + first_column, own, sums, lanes, shared);
}

int lanes_for(int64_t vectors) {
  int lanes = 1;
  while (lanes < vectors && lanes < kMaxLanes) lanes *= 2;
  return lanes;
}

}  // namespace

void launch_add_partials(float* accumulator, const float* partials, int num_partials, int64_t cols,
                         cudaStream_t stream) {
  if (cols == 0) return;
  add_partials<<<static_cast<unsigned>(divide_up(cols, 32)), 32 * kWarps, 0, stream>>>(
      accumulator, partials, num_partials, cols);
  check(cudaGetLastError());
}

void launch_column_sums(const ColumnSums& call, cudaStream_t stream) {
  if (call.rows.bound == 0 || call.cols == 0) return;
  const bool vectors = are_whole_vectors(call.dtype, call.cols) && are_aligned(call.x);
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    const int64_t row_vectors = call.cols / kWidth;
    const int lanes = lanes_for(row_vectors);
    const int64_t slabs = divide_up(row_vectors, lanes);
    const int64_t wanted = divide_up(call.rows.bound, kRows * (kThreads / lanes));
    const int64_t resident = std::max<int64_t>(2 * call.num_sms / slabs, 1);
    const auto blocks = static_cast<int>(std::min({wanted, resident, int64_t{kMaxColumnPartials}}));
    sum_columns<T, kWidth>
        <<<dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(slabs)), kThreads, 0,
           stream>>>(static_cast<const T*>(call.x), call.rows, call.cols, lanes, call.partials);
    check(cudaGetLastError());
    launch_add_partials(call.accumulator, call.partials, blocks, call.cols, stream);
  });
}

}  // namespace tessera::cuda
