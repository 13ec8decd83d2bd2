#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/newton_schulz/newton_schulz_factors.h"
#include "ops/newton_schulz/newton_schulz_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSums = NewtonSchulzFactors::kSums;
constexpr int kMaxBlocks = 64;  // of a matrix

__device__ __forceinline__ double sum_block(double x) {
  __shared__ double warps[kThreads / 32];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xFFFFFFFF, x, step);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();
  double total = 0;
  for (int warp = 0; warp < kThreads / 32; ++warp) total += warps[warp];
  return total;
}

/// Block (i, j) sums every kSums-th step of matrix j, from the i-th on: the sum of a matrix depends
/// neither on the GPU nor on the batch.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    sum_squares(const T* from, double* sums, int64_t elements) {
  wait_for_earlier();
  const T* const matrix = from + blockIdx.y * elements;
  const int64_t stride = static_cast<int64_t>(kSums) * kThreads * kWidth;
  double sum = 0;
  for (int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kWidth;
       at < elements; at += stride) {
    const Floats<kWidth> values = load<kWidth>(matrix + at);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum += static_cast<double>(values[i]) * values[i];
  }
  sum = sum_block(sum);
  if (threadIdx.x == 0) sums[blockIdx.y * kSums + blockIdx.x] = sum;
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    scale_matrices(const T* from, T* to, const double* sums, int64_t elements) {
  wait_for_earlier();
  double sum = 0;
#pragma unroll
  for (int i = 0; i < kSums; ++i) sum += sums[blockIdx.y * kSums + i];
  const auto scale = static_cast<float>(1 / (sqrt(sum) + NewtonSchulzFactors::kEps));
  const int64_t first = blockIdx.y * elements;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads * kWidth;
  for (int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kWidth;
       at < elements; at += stride) {
    Floats<kWidth> values = load<kWidth>(from + first + at);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] *= scale;
    store(to + first + at, values);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    make_polynomial(const T* gram, const float* square, T* to, int64_t n) {
  wait_for_earlier();
  const int64_t elements = n * n;
  const int64_t first = blockIdx.y * elements;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; at < elements;
       at += stride) {
    const float diagonal = at % (n + 1) == 0 ? NewtonSchulzFactors::kA : 0.0F;
    const float g = static_cast<float>(gram[first + at]);
    const float s = square[first + at];
    Floats<1> value;
    value[0] =
        __fmaf_rn(NewtonSchulzFactors::kC, s, __fmaf_rn(NewtonSchulzFactors::kB, g, diagonal));
    store(to + first + at, value);
  }
}

dim3 blocks_for(int64_t elements, int width, int64_t batch) {
  const int64_t blocks = divide_up(elements, static_cast<int64_t>(kThreads) * width);
  return {static_cast<unsigned>(std::min<int64_t>(blocks, kMaxBlocks)),
          static_cast<unsigned>(batch)};
}

}  // namespace

void launch_normalize(DType dtype, const void* from, void* to, double* sums, int64_t batch,
                      int64_t elements, cudaStream_t stream) {
  const bool vectors = are_aligned(from, to) && are_whole_vectors(dtype, elements);
  with_vectors(dtype, vectors, [&]<typename T, int kWidth>() {
    const auto* const source = static_cast<const T*>(from);
    launch_early(sum_squares<T, kWidth>, {{kSums, static_cast<unsigned>(batch)}, kThreads}, stream,
                 source, sums, elements);
    launch_early(scale_matrices<T, kWidth>, {blocks_for(elements, kWidth, batch), kThreads}, stream,
                 source, static_cast<T*>(to), static_cast<const double*>(sums), elements);
  });
}

void launch_polynomial(DType dtype, const void* gram, const float* square, void* to, int64_t batch,
                       int64_t n, cudaStream_t stream) {
  with_type(dtype, [&]<typename T>() {
    launch_early(make_polynomial<T>, {blocks_for(n * n, 1, batch), kThreads}, stream,
                 static_cast<const T*>(gram), square, static_cast<T*>(to), n);
  });
}

}  // namespace tessera::cuda
