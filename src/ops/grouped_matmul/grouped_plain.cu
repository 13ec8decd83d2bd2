// Grouped products of any type and shape, where the tensor cores' kernels or TMA do not
// fit: tiles in shared memory, sums in F32, in the order of the reduction.
#include <cuda_bf16.h>

#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/grouped_matmul/grouped_kernels.h"
#include "ops/grouped_matmul/grouped_tiles.cuh"

namespace tessera::cuda {
namespace {

constexpr int kTile = 64;       // rows and columns of a block's result
constexpr int kReduction = 16;  // values of the reduction that a block holds at a time
constexpr int kPerThread = 4;   // rows and columns of a thread's result
constexpr int kThreads = (kTile / kPerThread) * (kTile / kPerThread);
constexpr int kLoads = kTile * kReduction / kThreads;

/// Part of a row-major matrix that is one side of a product: `size` places, each with
/// `reduction` values. Which of the two lies along the matrix's rows is kAlongRows of Operand.
struct Side {
  const void* data;
  int64_t stride;
  int64_t size;
  int64_t reduction;
  const int* source = nullptr;  ///< of gathered rows: row r is row source[r] / top_k, or zeros
  int top_k = 1;
};

/// Fetches a side's values, zero beyond its ends; consecutive threads fetch consecutive values.
template <typename T, bool kReductionAlongRows, bool kGather = false>
struct Operand {
  Side side;

  static __device__ int place(int i) {
    const int linear = threadIdx.x + i * kThreads;
    return kReductionAlongRows ? linear / kReduction : linear % kTile;
  }
  static __device__ int step(int i) {
    const int linear = threadIdx.x + i * kThreads;
    return kReductionAlongRows ? linear % kReduction : linear / kTile;
  }

  __device__ float value(int64_t row, int64_t column) const {
    if constexpr (kGather) {
      const int source = side.source[row];
      if (source < 0) return 0.0F;
      row = source / side.top_k;
    }
    return static_cast<float>(static_cast<const T*>(side.data)[row * side.stride + column]);
  }

  __device__ void fetch(float (&values)[kLoads], int64_t first_place, int64_t first_step) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int64_t p = first_place + place(i);
      const int64_t k = first_step + step(i);
      const bool inside = p < side.size && k < side.reduction;
      values[i] = !inside ? 0.0F : kReductionAlongRows ? value(p, k) : value(k, p);
    }
  }
};

/// The rows of an expert, which begin at `row`: of the matrix, or of what is gathered from it.
template <typename T, bool kGather, typename Params>
__device__ Side rows_of_expert(const Params& params, const void* matrix, int64_t row,
                               int64_t stride, int64_t size, int64_t reduction) {
  if constexpr (kGather) {
    return {matrix, stride, size, reduction, params.source + row, params.top_k};
  } else {
    return {static_cast<const T*>(matrix) + row * stride, stride, size, reduction};
  }
}

using Slab = float[kReduction][kTile + 4];

template <typename Operand>
__device__ void keep(Slab& slab, const float (&values)[kLoads]) {
#pragma unroll
  for (int i = 0; i < kLoads; ++i) slab[Operand::step(i)][Operand::place(i)] = values[i];
}

using Sums = float[kPerThread][kPerThread];

__device__ void add_products(Sums& sums, const Slab& rows, const Slab& columns, int row,
                             int column) {
#pragma unroll
  for (int k = 0; k < kReduction; ++k) {
    const float4 a = *reinterpret_cast<const float4*>(&rows[k][row]);
    const float4 b = *reinterpret_cast<const float4*>(&columns[k][column]);
    const float a_values[] = {a.x, a.y, a.z, a.w};
    const float b_values[] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) sums[i][j] += a_values[i] * b_values[j];
    }
  }
}

__device__ int own_row() {
  return threadIdx.x / (kTile / kPerThread) * kPerThread;
}
__device__ int own_column() {
  return threadIdx.x % (kTile / kPerThread) * kPerThread;
}

/// A tile of the product of two sides; the next values are fetched while these are multiplied.
template <typename Rows, typename Columns>
__device__ void multiply_tile(Sums& sums, const Rows& rows, int64_t first_row,
                              const Columns& columns, int64_t first_column) {
  __shared__ Slab row_slab;
  __shared__ Slab column_slab;
  float row_values[kLoads];
  float column_values[kLoads];
  rows.fetch(row_values, first_row, 0);
  columns.fetch(column_values, first_column, 0);
  for (int64_t k = 0; k < rows.side.reduction; k += kReduction) {
    keep<Rows>(row_slab, row_values);
    keep<Columns>(column_slab, column_values);
    __syncthreads();
    rows.fetch(row_values, first_row, k + kReduction);
    columns.fetch(column_values, first_column, k + kReduction);
    add_products(sums, row_slab, column_slab, own_row(), own_column());
    __syncthreads();
  }
}

template <typename T, bool kByOut, bool kGather>
__global__ void __launch_bounds__(kThreads) plain_rows_kernel(const PlainRowsParams params) {
  wait_for_earlier();
  const int64_t* const offsets = params.offsets;
  const BlockTile place = find_block_tile<kTile>(
      params.num_experts, [&](int e) { return offsets[e + 1] - offsets[e]; });
  if (place.expert < 0) return;
  const int64_t begin = params.block_begin[place.expert];
  const int64_t group = params.block_begin[place.expert + 1] - begin;
  const int64_t num_columns = kByOut ? group : params.wide;
  const int64_t reduction = kByOut ? params.wide : group;
  const int64_t first_column = int64_t{blockIdx.y} * kTile;
  if (first_column >= num_columns) return;
  const int64_t row = offsets[place.expert];
  const int64_t num_rows = offsets[place.expert + 1] - row;
  const int64_t a_stride = kByOut ? params.wide : params.largest;
  const int64_t y_stride = kByOut ? params.largest : params.wide;
  const Operand<T, true, kGather> a{
      rows_of_expert<T, kGather>(params, params.a, row, a_stride, num_rows, reduction)};
  const Operand<T, kByOut> weight{{static_cast<const T*>(params.weight) + begin * params.wide,
                                   params.wide, num_columns, reduction}};
  Sums sums{};
  multiply_tile(sums, a, place.first, weight, first_column);
  T* const y = static_cast<T*>(params.y) + row * y_stride;
  for (int i = 0; i < kPerThread; ++i) {
    const int64_t r = place.first + own_row() + i;
    for (int j = 0; j < kPerThread; ++j) {
      const int64_t column = first_column + own_column() + j;
      if (r < num_rows && column < num_columns) y[r * y_stride + column] = T(sums[i][j]);
    }
  }
}

template <typename T, bool kGather>
__global__ void __launch_bounds__(kThreads) plain_wgrad_kernel(const PlainWgradParams params) {
  wait_for_earlier();
  const int* const block_begin = params.block_begin;
  const BlockTile place = find_block_tile<kTile>(
      params.num_experts, [&](int e) { return int64_t{block_begin[e + 1] - block_begin[e]}; });
  if (place.expert < 0) return;
  const int64_t begin = block_begin[place.expert];
  const int64_t group = block_begin[place.expert + 1] - begin;
  const int64_t row = params.offsets[place.expert];
  const int64_t num_rows = params.offsets[place.expert + 1] - row;
  if (num_rows == 0 && params.accumulate) return;
  const int64_t first_column = int64_t{blockIdx.y} * kTile;
  const Operand<T, false> narrow{{static_cast<const T*>(params.narrow) + row * params.largest,
                                  params.largest, group, num_rows}};
  const Operand<T, false, kGather> wide{rows_of_expert<T, kGather>(
      params, params.wide_rows, row, params.wide, params.wide, num_rows)};
  Sums sums{};
  multiply_tile(sums, narrow, place.first, wide, first_column);
  for (int i = 0; i < kPerThread; ++i) {
    const int64_t g = place.first + own_row() + i;
    for (int j = 0; j < kPerThread; ++j) {
      const int64_t column = first_column + own_column() + j;
      if (g >= group || column >= params.wide) continue;
      float* const to = params.grad + (begin + g) * params.wide + column;
      *to = sums[i][j] + (params.accumulate ? *to : 0.0F);
    }
  }
}

/// A block for every tile of `extent` places dealt to experts, and for every tile of columns.
template <typename Params>
void launch(void (*kernel)(Params), const Params& params, int64_t extent, int64_t num_columns,
            cudaStream_t stream) {
  const int64_t tiles = extent / kTile + params.num_experts;
  const dim3 grid(static_cast<unsigned>(tiles),
                  static_cast<unsigned>((num_columns + kTile - 1) / kTile));
  const size_t shared = static_cast<size_t>(params.num_experts + 1) * sizeof(int);
  launch_early(kernel, {grid, kThreads, shared}, stream, params);
}

}  // namespace

void launch_plain_rows(const PlainRowsParams& params, bool by_out, DType dtype,
                       cudaStream_t stream) {
  const int64_t columns = by_out ? params.largest : params.wide;
  with_type(dtype, [&]<typename T>() {
    auto* kernel = plain_rows_kernel<T, false, false>;
    if (by_out) kernel = plain_rows_kernel<T, true, false>;
    if (by_out && params.source != nullptr) kernel = plain_rows_kernel<T, true, true>;
    launch(kernel, params, params.num_rows, columns, stream);
  });
}

void launch_plain_wgrad(const PlainWgradParams& params, DType dtype, cudaStream_t stream) {
  with_type(dtype, [&]<typename T>() {
    const auto kernel =
        params.source == nullptr ? plain_wgrad_kernel<T, false> : plain_wgrad_kernel<T, true>;
    launch(kernel, params, params.total, params.wide, stream);
  });
}

}  // namespace tessera::cuda
