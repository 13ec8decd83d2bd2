// A block of threads takes 128 × 128 elements, which wait in registers while their scale is found,
// and then lie in shared memory as they are turned. Scales of rows of y are found by a pass of
// their own.
#include "ops/cuda/fp8_cast.cuh"
#include "ops/quantize/quantize_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = 128;
constexpr int kWidth = 8;  // columns that a thread has
constexpr int kAcross = kTile / kWidth;
constexpr int kRows = kTile / (kThreads / kAcross);  // and rows
static_assert(kRows == 8);
/// Tiles, one below the other, of which a block of threads finds the largest values.
constexpr int kTilesOfSearch = 4;

/// This thread's part of a tile: 8 rows of 8 columns.
struct Corner {
  int64_t row;
  int64_t column;
};

__device__ __forceinline__ Corner find_corner(int64_t row_tile) {
  const int thread = static_cast<int>(threadIdx.x);
  return {row_tile * kTile + thread / kAcross * kRows,
          static_cast<int64_t>(blockIdx.x) * kTile + thread % kAcross * kWidth};
}

template <typename T>
__device__ __forceinline__ void load_part(const TurnedMatrices& m, const Corner& corner,
                                          Pack<T, kWidth> (&part)[kRows]) {
  const T* const x =
      static_cast<const T*>(m.x) + static_cast<int64_t>(blockIdx.z) * m.num_rows * m.num_columns;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const bool is_there = corner.column < m.num_columns && corner.row + r < m.num_rows;
    part[r] = is_there ? load_pack<kWidth>(x + (corner.row + r) * m.num_columns + corner.column)
                       : Pack<T, kWidth>{};
  }
}

/// Of all threads.
__device__ __forceinline__ float find_largest(float own) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) own = fmaxf(own, __shfl_xor_sync(~0U, own, step));
  __shared__ float largest[kThreads / 32];
  if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = own;
  __syncthreads();
  float all = largest[0];
#pragma unroll
  for (int warp = 1; warp < kThreads / 32; ++warp) all = fmaxf(all, largest[warp]);
  return all;
}

/// Leaves the largest magnitude of each column in place of its scale, which is 0 before.
template <typename T>
__global__ void __launch_bounds__(kThreads) find_columns_kernel(const TurnedMatrices m) {
  float own[kWidth] = {};
  for (int t = 0; t < kTilesOfSearch; ++t) {
    const int64_t tile = static_cast<int64_t>(blockIdx.y) * kTilesOfSearch + t;
    if (tile * kTile >= m.num_rows) break;
    Pack<T, kWidth> part[kRows];
    load_part(m, find_corner(tile), part);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        own[i] = fmaxf(own[i], fabsf(static_cast<float>(part[r].at[i])));
    }
  }
  __shared__ float largest[kThreads / kAcross][kTile];
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int i = 0; i < kWidth; ++i)
    largest[thread / kAcross][thread % kAcross * kWidth + i] = own[i];
  __syncthreads();
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kTile + thread;
  if (thread >= kTile || column >= m.num_columns) return;
  float all = 0;
#pragma unroll
  for (int i = 0; i < kThreads / kAcross; ++i) all = fmaxf(all, largest[i][thread]);
  // Words of numbers that are not negative are in their order.
  atomicMax(reinterpret_cast<int*>(m.scales) + blockIdx.z * m.num_columns + column,
            static_cast<int>(word_of_float(all)));
}

template <bool kE4m3>
__global__ void __launch_bounds__(kThreads) finish_scales_kernel(float* scales, int64_t count) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at < count) scales[at] = scale_for<kE4m3>(scales[at]);
}

/// The factors of this thread's columns.
template <bool kE4m3, bool kByBlock, typename T>
__device__ __forceinline__ Floats<kWidth> find_factors(const TurnedMatrices& m,
                                                       const Corner& corner,
                                                       const Pack<T, kWidth> (&part)[kRows]) {
  Floats<kWidth> factors;
  if constexpr (kByBlock) {
    float own = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) own = largest_in(part[r], own);
    const float scale = scale_for<kE4m3>(find_largest(own));
#pragma unroll
    for (int i = 0; i < kWidth; ++i) factors[i] = __frcp_rn(scale);
    if (threadIdx.x == 0) {
      const int64_t block_row = (blockIdx.z * m.num_columns) / kTile + blockIdx.x;
      m.scales[block_row * gridDim.y + blockIdx.y] = scale;
    }
  } else {
    const float* const largest = m.scales + blockIdx.z * m.num_columns + corner.column;
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
      factors[i] = corner.column < m.num_columns ? __frcp_rn(scale_for<kE4m3>(largest[i])) : 0.0F;
  }
  return factors;
}

template <typename T, bool kE4m3, bool kByBlock>
__global__ void __launch_bounds__(kThreads) turn_kernel(const TurnedMatrices m) {
  // Columns of the tile, whose eights of elements are swapped so that threads that write, and those
  // that read, do not meet in a bank.
  __shared__ alignas(16) uint2 tile[kTile][kTile / 8];
  const Corner corner = find_corner(blockIdx.y);
  Pack<T, kWidth> part[kRows];
  load_part(m, corner, part);
  const Floats<kWidth> factors = find_factors<kE4m3, kByBlock>(m, corner, part);
  const int thread = static_cast<int>(threadIdx.x);
  const int across = thread % kAcross;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    Floats<kRows> scaled;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      scaled[r] = __fmul_rn(static_cast<float>(part[r].at[i]), factors[i]);
    const Pack<uint8_t, kRows> codes = to_fp8<kE4m3>(scaled);
    tile[across * kWidth + i][(thread / kAcross) ^ across] = reinterpret_cast<const uint2&>(codes);
  }
  __syncthreads();
  constexpr int kChunks = kTile / 16;
#pragma unroll
  for (int at = thread; at < kTile * kChunks; at += kThreads) {
    const int column = at / kChunks;
    const int eight = at % kChunks * 2;
    const int64_t to_row = static_cast<int64_t>(blockIdx.x) * kTile + column;
    const int64_t to_column = static_cast<int64_t>(blockIdx.y) * kTile + eight * 8;
    if (to_row >= m.num_columns || to_column >= m.num_rows) continue;
    const uint2 first = tile[column][eight ^ (column / kWidth)];
    const uint2 second = tile[column][(eight + 1) ^ (column / kWidth)];
    uint8_t* const y =
        static_cast<uint8_t*>(m.y) + (blockIdx.z * m.num_columns + to_row) * m.num_rows + to_column;
    *reinterpret_cast<uint4*>(y) = {first.x, first.y, second.x, second.y};
  }
}

template <typename T, bool kE4m3>
void launch(const TurnedMatrices& m, cudaStream_t stream) {
  const auto across = static_cast<unsigned>(divide_up(m.num_columns, kTile));
  const auto down = static_cast<unsigned>(divide_up(m.num_rows, kTile));
  const auto matrices = static_cast<unsigned>(m.num_matrices);
  const dim3 tiles(across, down, matrices);
  if (m.by_block) {
    turn_kernel<T, kE4m3, true><<<tiles, kThreads, 0, stream>>>(m);
    return check(cudaGetLastError());
  }
  const int64_t num_scales = m.num_matrices * m.num_columns;
  check(cudaMemsetAsync(m.scales, 0, num_scales * sizeof(float), stream));
  const dim3 strips(across, static_cast<unsigned>(divide_up(down, kTilesOfSearch)), matrices);
  find_columns_kernel<T><<<strips, kThreads, 0, stream>>>(m);
  turn_kernel<T, kE4m3, false><<<tiles, kThreads, 0, stream>>>(m);
  const auto blocks = static_cast<unsigned>(divide_up(num_scales, kThreads));
  finish_scales_kernel<kE4m3><<<blocks, kThreads, 0, stream>>>(m.scales, num_scales);
  check(cudaGetLastError());
}

}  // namespace

void launch_quantize_turned(const TurnedMatrices& matrices, cudaStream_t stream) {
  with_type(matrices.dtype, [&]<typename T>() {
    matrices.element == DType::kE4M3 ? launch<T, true>(matrices, stream)
                                     : launch<T, false>(matrices, stream);
  });
}

}  // namespace tessera::cuda
