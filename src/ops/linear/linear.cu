#include <cuda_bf16.h>

#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/few_rows.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/linear/linear_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;

/// Neighbouring values of a row, read and written at once.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T values[kCount];
};

template <typename T, int kVector>
__global__ void __launch_bounds__(kThreads)
    add_bias_kernel(const float* products, const float* bias, T* out, int64_t num_rows,
                    int64_t num_columns) {
  wait_for_earlier();
  using Floats = Vector<float, kVector>;
  const int64_t column = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kVector;
  if (column >= num_columns) return;
  const Floats own = *reinterpret_cast<const Floats*>(bias + column);
#pragma unroll 4
  for (int64_t row = blockIdx.y; row < num_rows; row += gridDim.y) {
    const int64_t at = row * num_columns + column;
    const Floats from = *reinterpret_cast<const Floats*>(products + at);
    Vector<T, kVector> to;
#pragma unroll
    for (int i = 0; i < kVector; ++i) to.values[i] = T(from.values[i] + own.values[i]);
    *reinterpret_cast<Vector<T, kVector>*>(out + at) = to;
  }
}

__global__ void row_range_kernel(const int64_t* extent, int64_t* offsets) {
  wait_for_earlier();
  offsets[0] = 0;
  offsets[1] = *extent;
}

unsigned blocks_of(int64_t count) {
  return static_cast<unsigned>((count + kThreads - 1) / kThreads);
}

template <typename T>
void launch_bias(const float* products, const float* bias, void* out, int64_t num_rows,
                 int64_t num_columns, cudaStream_t stream) {
  constexpr int kVector = 4;
  constexpr int64_t kRowsOfThread = 4;
  const auto addresses = reinterpret_cast<uintptr_t>(products) | reinterpret_cast<uintptr_t>(bias) |
                         reinterpret_cast<uintptr_t>(out);
  const bool vectors = num_columns % kVector == 0 && addresses % (kVector * sizeof(float)) == 0;
  const int64_t rows = (num_rows + kRowsOfThread - 1) / kRowsOfThread;
  const dim3 grid(blocks_of(vectors ? num_columns / kVector : num_columns),
                  static_cast<unsigned>(rows < 65535 ? rows : 65535));
  const auto kernel = vectors ? add_bias_kernel<T, kVector> : add_bias_kernel<T, 1>;
  launch_early(kernel, {grid, kThreads}, stream, products, bias, static_cast<T*>(out), num_rows,
               num_columns);
}

constexpr int kColumnsOfWarp = 2;
constexpr int kColumnsOfBlock = kThreads / 32 * kColumnsOfWarp;

__global__ void __launch_bounds__(kThreads) multiply_one(const OneLinearRow p) {
  wait_for_earlier();
  let_next_begin();
  const int64_t column = int64_t{blockIdx.x} * kColumnsOfBlock + threadIdx.x / 32 * kColumnsOfWarp;
  if (column >= p.num_columns) return;
  const BFloat16* const rows[] = {static_cast<const BFloat16*>(p.x)};
  float sums[1][kColumnsOfWarp];
  multiply_few_rows(rows, static_cast<const BFloat16*>(p.weight) + column * p.width, p.width, sums);
  if (threadIdx.x % 32 != 0) return;
  Floats<kColumnsOfWarp> y = {{sums[0][0], sums[0][1]}};
  if (p.addend != nullptr) {
    const Floats<kColumnsOfWarp> more =
        load<kColumnsOfWarp>(static_cast<const BFloat16*>(p.addend) + column);
#pragma unroll
    for (int c = 0; c < kColumnsOfWarp; ++c) y[c] += more[c];
  }
  store(static_cast<BFloat16*>(p.y) + column, y);
}
static_assert(kColumnsOfWarp == 2);

}  // namespace

void launch_one_linear_row(const OneLinearRow& p, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(divide_up(p.num_columns, kColumnsOfBlock));
  launch_early(multiply_one, {blocks, kThreads}, stream, p);
}

void launch_add_bias(const float* products, const float* bias, void* out, DType dtype,
                     int64_t num_rows, int64_t num_columns, cudaStream_t stream) {
  if (num_rows == 0 || num_columns == 0) return;
  with_type(dtype, [&]<typename T>() {
    launch_bias<T>(products, bias, out, num_rows, num_columns, stream);
  });
}

void launch_row_range(const int64_t* extent, int64_t* offsets, cudaStream_t stream) {
  launch_early(row_range_kernel, {1, 1}, stream, extent, offsets);
}

}  // namespace tessera::cuda
