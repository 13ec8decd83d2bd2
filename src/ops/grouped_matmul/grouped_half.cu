// Grouped products of F16, of any shape, on tensor cores: 16 x 16 x 16 fragments of tiles in shared
// memory (CUDA's wmma), sums and results in F32. Values beyond a matrix are zeros on both sides of
// the reduction, so that they add nothing even to what is infinite.
#include <cuda_fp16.h>
#include <mma.h>

#include <type_traits>

#include "ops/cuda/dependent_launch.cuh"
#include "ops/grouped_matmul/grouped_kernels.h"
#include "ops/grouped_matmul/grouped_tiles.cuh"

namespace tessera::cuda {
namespace {

namespace wmma = nvcuda::wmma;

constexpr int kTile = 128;      // rows and columns of a block's result
constexpr int kReduction = 32;  // values of the reduction that a block holds at a time
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kPart = 16;      // rows, columns and reduction of a fragment
constexpr int kWarpRows = 64;  // of the result, for each warp
constexpr int kWarpColumns = 32;
constexpr int kRowParts = kWarpRows / kPart;
constexpr int kColumnParts = kWarpColumns / kPart;
constexpr int kVector = 8;  // halves in 16 bytes
constexpr int kLoads = kTile * kReduction / kVector / kThreads;
constexpr int kPad = 8;  // halves behind each row of a tile, so that rows begin in other banks

/// Halves as words, of which zeros are zeros.
struct alignas(16) Vector {
  uint16_t at[kVector];
};

/// Part of a row-major matrix that is one side of a product: `size` places, each with `reduction`
/// values. kAlongRows: places are rows, and the reduction lies along them; else places are columns.
template <bool kAlongRows>
struct Side {
  using Layout = std::conditional_t<kAlongRows, wmma::row_major, wmma::col_major>;
  static constexpr int kTileRows = kAlongRows ? kTile : kReduction;
  static constexpr int kTileColumns = kAlongRows ? kReduction : kTile;
  static constexpr int kStride = kTileColumns + kPad;
  static constexpr int kHalves = kTileRows * kStride;

  const uint16_t* data;
  int64_t stride;
  int64_t size;
  int64_t reduction;
  bool by_vector;  ///< rows begin, and the matrix ends, at multiples of 16 bytes

  static __device__ int tile_row(int i) {
    return (static_cast<int>(threadIdx.x) + i * kThreads) / (kTileColumns / kVector);
  }
  static __device__ int tile_column(int i) {
    return (static_cast<int>(threadIdx.x) + i * kThreads) % (kTileColumns / kVector) * kVector;
  }

  __device__ Vector value(int64_t row, int64_t column) const {
    const int64_t num_rows = kAlongRows ? size : reduction;
    const int64_t num_columns = kAlongRows ? reduction : size;
    Vector vector{};
    if (row >= num_rows || column >= num_columns) return vector;
    const uint16_t* const from = data + row * stride + column;
    if (by_vector) return *reinterpret_cast<const Vector*>(from);
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      if (column + i < num_columns) vector.at[i] = from[i];
    return vector;
  }

  __device__ void fetch(Vector (&values)[kLoads], int64_t first_place, int64_t first_step) const {
    const int64_t first_row = kAlongRows ? first_place : first_step;
    const int64_t first_column = kAlongRows ? first_step : first_place;
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      values[i] = value(first_row + tile_row(i), first_column + tile_column(i));
  }

  static __device__ void keep(__half* tile, const Vector (&values)[kLoads]) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      *reinterpret_cast<Vector*>(tile + tile_row(i) * kStride + tile_column(i)) = values[i];
  }

  /// Where in a tile a fragment begins.
  static __device__ const __half* part(const __half* tile, int place, int step) {
    return kAlongRows ? tile + place * kStride + step : tile + step * kStride + place;
  }
};

using Sum = wmma::fragment<wmma::accumulator, kPart, kPart, kPart, float>;
using Sums = Sum[kRowParts][kColumnParts];

__device__ int warp_row() {
  return static_cast<int>(threadIdx.x) / 32 / (kTile / kWarpColumns) * kWarpRows;
}
__device__ int warp_column() {
  return static_cast<int>(threadIdx.x) / 32 % (kTile / kWarpColumns) * kWarpColumns;
}

/// A column of one side is a row of the other's layout: B is read as the transposed of its side.
template <bool kAlongRows>
using ColumnLayout = std::conditional_t<kAlongRows, wmma::col_major, wmma::row_major>;

template <bool kRowsAlong, bool kColumnsAlong>
__device__ void add_products(Sums& sums, const __half* rows, const __half* columns) {
#pragma unroll
  for (int step = 0; step < kReduction; step += kPart) {
    wmma::fragment<wmma::matrix_a, kPart, kPart, kPart, __half, typename Side<kRowsAlong>::Layout>
        a[kRowParts];
    wmma::fragment<wmma::matrix_b, kPart, kPart, kPart, __half, ColumnLayout<kColumnsAlong>>
        b[kColumnParts];
#pragma unroll
    for (int i = 0; i < kRowParts; ++i)
      wmma::load_matrix_sync(a[i], Side<kRowsAlong>::part(rows, warp_row() + i * kPart, step),
                             Side<kRowsAlong>::kStride);
#pragma unroll
    for (int j = 0; j < kColumnParts; ++j)
      wmma::load_matrix_sync(b[j],
                             Side<kColumnsAlong>::part(columns, warp_column() + j * kPart, step),
                             Side<kColumnsAlong>::kStride);
#pragma unroll
    for (int i = 0; i < kRowParts; ++i) {
#pragma unroll
      for (int j = 0; j < kColumnParts; ++j) wmma::mma_sync(sums[i][j], a[i], b[j], sums[i][j]);
    }
  }
}

/// A tile of the product of two sides, whose element (place of `rows`, place of `columns`) goes to
/// `store`; the next values are fetched while these are multiplied.
template <bool kRowsAlong, bool kColumnsAlong, typename Store>
__device__ void multiply_tile(const Side<kRowsAlong>& rows, int64_t first_row,
                              const Side<kColumnsAlong>& columns, int64_t first_column,
                              const Store& store) {
  __shared__ alignas(32) __half row_tile[Side<kRowsAlong>::kHalves];
  __shared__ alignas(32) __half column_tile[Side<kColumnsAlong>::kHalves];
  __shared__ alignas(32) float results[kWarps][kPart * kPart];
  Sums sums;
#pragma unroll
  for (int i = 0; i < kRowParts; ++i) {
#pragma unroll
    for (int j = 0; j < kColumnParts; ++j) wmma::fill_fragment(sums[i][j], 0.0F);
  }
  Vector row_values[kLoads];
  Vector column_values[kLoads];
  rows.fetch(row_values, first_row, 0);
  columns.fetch(column_values, first_column, 0);
  for (int64_t k = 0; k < rows.reduction; k += kReduction) {
    rows.keep(row_tile, row_values);
    columns.keep(column_tile, column_values);
    __syncthreads();
    rows.fetch(row_values, first_row, k + kReduction);
    columns.fetch(column_values, first_column, k + kReduction);
    add_products<kRowsAlong, kColumnsAlong>(sums, row_tile, column_tile);
    __syncthreads();
  }
  float* const own = results[threadIdx.x / 32];
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < kRowParts; ++i) {
#pragma unroll
    for (int j = 0; j < kColumnParts; ++j) {
      wmma::store_matrix_sync(own, sums[i][j], kPart, wmma::mem_row_major);
      __syncwarp();
      for (int at = lane; at < kPart * kPart; at += 32) {
        const int64_t row = first_row + warp_row() + i * kPart + at / kPart;
        const int64_t column = first_column + warp_column() + j * kPart + at % kPart;
        if (row < rows.size && column < columns.size) store(row, column, own[at]);
      }
      __syncwarp();
    }
  }
}

template <bool kByOut>
__global__ void __launch_bounds__(kThreads)
    half_rows_kernel(const PlainRowsParams params, bool by_vector) {
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
  const Side<true> a{static_cast<const uint16_t*>(params.a) + row * a_stride, a_stride, num_rows,
                     reduction, by_vector};
  const Side<kByOut> weight{static_cast<const uint16_t*>(params.weight) + begin * params.wide,
                            params.wide, num_columns, reduction, by_vector};
  float* const y = static_cast<float*>(params.y) + row * y_stride;
  multiply_tile(a, place.first, weight, first_column,
                [&](int64_t r, int64_t column, float sum) { y[r * y_stride + column] = sum; });
}

__global__ void __launch_bounds__(kThreads)
    half_wgrad_kernel(const PlainWgradParams params, bool by_vector) {
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
  const Side<false> narrow{static_cast<const uint16_t*>(params.narrow) + row * params.largest,
                           params.largest, group, num_rows, by_vector};
  const Side<false> wide{static_cast<const uint16_t*>(params.wide_rows) + row * params.wide,
                         params.wide, params.wide, num_rows, by_vector};
  multiply_tile(narrow, place.first, wide, first_column, [&](int64_t g, int64_t column, float sum) {
    float* const to = params.grad + (begin + g) * params.wide + column;
    *to = sum + (params.accumulate ? *to : 0.0F);
  });
}

/// A block for every tile of `extent` places dealt to experts, and for every tile of columns.
template <typename Params>
void launch(void (*kernel)(Params, bool), const Params& params, int64_t extent, int64_t num_columns,
            bool by_vector, cudaStream_t stream) {
  const int64_t tiles = extent / kTile + params.num_experts;
  const dim3 grid(static_cast<unsigned>(tiles),
                  static_cast<unsigned>((num_columns + kTile - 1) / kTile));
  const size_t shared = static_cast<size_t>(params.num_experts + 1) * sizeof(int);
  launch_early(kernel, {grid, kThreads, shared}, stream, params, by_vector);
}

}  // namespace

void launch_half_rows(const PlainRowsParams& params, bool by_out, bool by_vector,
                      cudaStream_t stream) {
  const int64_t columns = by_out ? params.largest : params.wide;
  launch(by_out ? half_rows_kernel<true> : half_rows_kernel<false>, params, params.num_rows,
         columns, by_vector, stream);
}

void launch_half_wgrad(const PlainWgradParams& params, bool by_vector, cudaStream_t stream) {
  launch(half_wgrad_kernel, params, params.total, params.wide, by_vector, stream);
}

}  // namespace tessera::cuda
