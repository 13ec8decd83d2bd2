#include "ops/cuda/vector.cuh"
#include "ops/grad_norm/grad_norm_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSumThreads = 1024;
constexpr int kBatch = 8;

__device__ __forceinline__ double sum_block(double x) {
  __shared__ double warps[32];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xFFFFFFFF, x, step);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();
  double total = 0;
  for (int warp = 0; warp < static_cast<int>(blockDim.x) / 32; ++warp) total += warps[warp];
  return total;
}

template <int kWidth>
__device__ __forceinline__ double square(const Pack<float, kWidth>& values) {
  double sum = 0;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const double x = values.at[i];
    sum += x * x;
  }
  return sum;
}

// A block for each chunk.
template <int kWidth>
__global__ void __launch_bounds__(kThreads)
    sum_chunks(const float* x, int64_t count, double* partials) {
  constexpr int kStep = kThreads * kWidth;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kSquaresChunk;
  const int length =
      static_cast<int>(count - begin < kSquaresChunk ? count - begin : kSquaresChunk);
  double sum = 0;
  for (int first = static_cast<int>(threadIdx.x) * kWidth; first < kSquaresChunk;
       first += kBatch * kStep) {
    Pack<float, kWidth> values[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int at = first + b * kStep;
      values[b] = {};
      if (at + kWidth <= length) {
        values[b] = load_pack<kWidth>(x + begin + at);
      } else {
        for (int i = 0; i < kWidth; ++i)
          if (at + i < length) values[b].at[i] = x[begin + at + i];
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) sum += square(values[b]);
  }
  sum = sum_block(sum);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kSumThreads)
    add_chunks(const double* partials, int64_t count, double* sum) {
  double total = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < count; i += kSumThreads) total += partials[i];
  total = sum_block(total);
  if (threadIdx.x == 0) *sum = total;
}

}  // namespace

void launch_sum_of_squares(const float* x, int64_t count, double* partials, double* sum,
                           cudaStream_t stream) {
  const int64_t chunks = divide_up(count, kSquaresChunk);
  if (chunks > 0) {
    const auto blocks = static_cast<unsigned>(chunks);
    if (are_aligned(x)) {
      sum_chunks<kVectorWidth<float>><<<blocks, kThreads, 0, stream>>>(x, count, partials);
    } else {
      sum_chunks<1><<<blocks, kThreads, 0, stream>>>(x, count, partials);
    }
    check(cudaGetLastError());
  }
  add_chunks<<<1, kSumThreads, 0, stream>>>(partials, chunks, sum);
  check(cudaGetLastError());
}

}  // namespace tessera::cuda
