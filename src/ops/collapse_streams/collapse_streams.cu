#include "ops/collapse_streams/collapse_streams_kernels.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/vector.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

/// A block to a token.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads) collapse(const __grid_constant__ CollapseCall p, T* y) {
  wait_for_earlier();
  const int64_t token = blockIdx.x;
  const T* x = static_cast<const T*>(p.x) + token * p.streams * p.hidden;
  const float* pre = p.pre + token * p.streams;
  for (int64_t i = threadIdx.x * kWidth; i < p.hidden; i += kThreads * kWidth) {
    Floats<kWidth> sum = {};
    for (int64_t j = 0; j < p.streams; ++j) {
      const Floats<kWidth> values = load<kWidth>(x + j * p.hidden + i);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sum[e] += pre[j] * values[e];
    }
    store(y + token * p.hidden + i, sum);
  }
}

template <typename T>
struct CollapseGrads {
  const T* grad;
  const T* addend;
  T* grad_x;
  float* grad_pre;
};

/// A block to a stream of a token.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    collapse_backward(const __grid_constant__ CollapseCall p, const CollapseGrads<T> g) {
  wait_for_earlier();
  __shared__ float of_warps[kWarps];
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(p.x) + row * p.hidden;
  const T* grad = g.grad + row / p.streams * p.hidden;
  const float weight = p.pre[row];
  float dot = 0;
  for (int64_t i = threadIdx.x * kWidth; i < p.hidden; i += kThreads * kWidth) {
    Floats<kWidth> values = load<kWidth>(grad + i);
    const Floats<kWidth> of_x = load<kWidth>(x + i);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      dot += values[e] * of_x[e];
      values[e] *= weight;
    }
    if (g.addend != nullptr) {
      const Floats<kWidth> added = load<kWidth>(g.addend + row * p.hidden + i);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) values[e] += added[e];
    }
    store(g.grad_x + row * p.hidden + i, values);
  }
  dot = sum_lanes(dot);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = dot;
  __syncthreads();
  if (threadIdx.x > 0) return;
  float total = 0;
  for (const float part : of_warps) total += part;
  g.grad_pre[row] = total;
}

}  // namespace

void launch_collapse_streams(const CollapseCall& call, void* y, cudaStream_t stream) {
  if (call.tokens == 0) return;
  const bool vectors = are_whole_vectors(call.dtype, call.hidden) && are_aligned(call.x, y);
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    launch_early(collapse<T, kWidth>, {static_cast<unsigned>(call.tokens), kThreads}, stream, call,
                 static_cast<T*>(y));
  });
}

void launch_collapse_streams_backward(const CollapseCall& call, const void* grad,
                                      const void* addend, void* grad_x, float* grad_pre,
                                      cudaStream_t stream) {
  if (call.tokens == 0) return;
  const bool vectors =
      are_whole_vectors(call.dtype, call.hidden) && are_aligned(call.x, grad, addend, grad_x);
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    launch_early(collapse_backward<T, kWidth>,
                 {static_cast<unsigned>(call.tokens * call.streams), kThreads}, stream, call,
                 CollapseGrads<T>{static_cast<const T*>(grad), static_cast<const T*>(addend),
                                  static_cast<T*>(grad_x), grad_pre});
  });
}

}  // namespace tessera::cuda
