#include <cuda_bf16.h>

#include "ops/cuda/check.h"
#include "ops/linear/linear_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;

/// Neighbouring values of a row, read and written at once.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T values[kCount];
};

/// One block sums a chunk of rows over kWarp · kVector columns: its warps take rows by turns and
/// their sums are added in order.
template <typename T, int kVector>
__global__ void __launch_bounds__(kThreads)
    sum_chunks_kernel(const LinearRows rows, float* partial) {
  __shared__ float warp_sums[kWarps][kWarp * kVector];
  const int64_t num_rows = rows.extent != nullptr ? *rows.extent : rows.num_rows;
  const int64_t chunk_rows = (num_rows + kLinearSumChunks - 1) / kLinearSumChunks;
  const int64_t begin = blockIdx.y * chunk_rows;
  const int64_t end = min(begin + chunk_rows, num_rows);
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int64_t first = int64_t{blockIdx.x} * kWarp * kVector;
  const int64_t column = first + lane * kVector;
  float sums[kVector] = {};
  if (column < rows.num_columns) {
#pragma unroll 4
    for (int64_t row = begin + warp; row < end; row += kWarps) {
      const T* const from = static_cast<const T*>(rows.data) + row * rows.num_columns + column;
      const auto loaded = *reinterpret_cast<const Vector<T, kVector>*>(from);
#pragma unroll
      for (int i = 0; i < kVector; ++i) sums[i] += static_cast<float>(loaded.values[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) warp_sums[warp][lane * kVector + i] = sums[i];
  __syncthreads();
  for (int i = threadIdx.x; i < kWarp * kVector; i += kThreads) {
    if (first + i >= rows.num_columns) return;
    float sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += warp_sums[w][i];
    partial[blockIdx.y * rows.num_columns + first + i] = sum;
  }
}

__global__ void add_chunks_kernel(const float* partial, float* sums, int64_t num_columns) {
  const int64_t column = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (column >= num_columns) return;
  float sum = 0;
#pragma unroll
  for (int64_t chunk = 0; chunk < kLinearSumChunks; ++chunk)
    sum += partial[chunk * num_columns + column];
  sums[column] += sum;
}

template <typename T, int kVector>
void launch_chunks(const LinearRows& rows, float* partial, cudaStream_t stream) {
  const int64_t blocks = (rows.num_columns + kWarp * kVector - 1) / (kWarp * kVector);
  const dim3 grid(static_cast<unsigned>(blocks), kLinearSumChunks);
  sum_chunks_kernel<T, kVector><<<grid, kThreads, 0, stream>>>(rows, partial);
  check(cudaGetLastError());
}

template <typename T>
void launch_chunks_of(const LinearRows& rows, float* partial, cudaStream_t stream) {
  constexpr int kVector = 16 / sizeof(T);
  const bool vectors = rows.num_columns % kVector == 0 &&
                       reinterpret_cast<uintptr_t>(rows.data) % sizeof(Vector<T, kVector>) == 0;
  vectors ? launch_chunks<T, kVector>(rows, partial, stream)
          : launch_chunks<T, 1>(rows, partial, stream);
}

template <typename T, int kVector>
__global__ void __launch_bounds__(kThreads)
    add_bias_kernel(const float* products, const float* bias, T* out, int64_t num_rows,
                    int64_t num_columns) {
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
  kernel<<<grid, kThreads, 0, stream>>>(products, bias, static_cast<T*>(out), num_rows,
                                        num_columns);
  check(cudaGetLastError());
}

}  // namespace

void launch_column_sums(const LinearRows& rows, float* partial, float* sums, cudaStream_t stream) {
  if (rows.num_rows == 0 || rows.num_columns == 0) return;
  rows.bf16 ? launch_chunks_of<__nv_bfloat16>(rows, partial, stream)
            : launch_chunks_of<float>(rows, partial, stream);
  add_chunks_kernel<<<blocks_of(rows.num_columns), kThreads, 0, stream>>>(partial, sums,
                                                                          rows.num_columns);
  check(cudaGetLastError());
}

void launch_add_bias(const float* products, const float* bias, void* out, bool bf16,
                     int64_t num_rows, int64_t num_columns, cudaStream_t stream) {
  if (num_rows == 0 || num_columns == 0) return;
  bf16 ? launch_bias<__nv_bfloat16>(products, bias, out, num_rows, num_columns, stream)
       : launch_bias<float>(products, bias, out, num_rows, num_columns, stream);
}

void launch_row_range(const int64_t* extent, int64_t* offsets, cudaStream_t stream) {
  row_range_kernel<<<1, 1, 0, stream>>>(extent, offsets);
  check(cudaGetLastError());
}

}  // namespace tessera::cuda
