#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/unit_norm/unit_norm_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kWarps = 8;

__device__ __forceinline__ int64_t own_head() {
  return static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
}

/// The same in all lanes, each of which reads the vectors that it goes on with.
template <typename T, int kWidth>
__device__ __forceinline__ float find_rstd(const UnitNormRows& call, const T* x) {
  float squares = 0;
  for (int64_t i = threadIdx.x % 32 * kWidth; i < call.size; i += 32 * kWidth) {
    const Floats<kWidth> values = load<kWidth>(x + i);
#pragma unroll
    for (int v = 0; v < kWidth; ++v) squares += values[v] * values[v];
  }
  return 1.0F / sqrtf(sum_lanes(squares) / static_cast<float>(call.size) + call.eps);
}

// A warp has a head.
template <typename T, int kWidth>
__global__ void __launch_bounds__(32 * kWarps)
    norm_heads(const __grid_constant__ UnitNormRows call, T* y) {
  wait_for_earlier();
  const int64_t head = own_head();
  if (head >= call.rows.in_use()) return;
  const T* const x = static_cast<const T*>(call.x) + head * call.size;
  const float rstd = find_rstd<T, kWidth>(call, x);
  for (int64_t i = threadIdx.x % 32 * kWidth; i < call.size; i += 32 * kWidth) {
    Floats<kWidth> values = load<kWidth>(x + i);
#pragma unroll
    for (int v = 0; v < kWidth; ++v) values[v] *= rstd;
    store(y + head * call.size + i, values);
  }
}

// With n = x · rstd: grad of x = rstd · (g - n · mean(g · n)).
template <typename T, int kWidth>
__global__ void __launch_bounds__(32 * kWarps)
    norm_heads_backward(const __grid_constant__ UnitNormRows call, const T* grad, T* grad_x) {
  wait_for_earlier();
  const int64_t head = own_head();
  if (head >= call.rows.in_use()) return;
  const int64_t at = head * call.size;
  const T* const x = static_cast<const T*>(call.x) + at;
  const float rstd = find_rstd<T, kWidth>(call, x);
  float dot = 0;
  for (int64_t i = threadIdx.x % 32 * kWidth; i < call.size; i += 32 * kWidth) {
    const Floats<kWidth> values = load<kWidth>(x + i);
    const Floats<kWidth> grads = load<kWidth>(grad + at + i);
#pragma unroll
    for (int v = 0; v < kWidth; ++v) dot += grads[v] * (values[v] * rstd);
  }
  const float mean = sum_lanes(dot) / static_cast<float>(call.size);
  for (int64_t i = threadIdx.x % 32 * kWidth; i < call.size; i += 32 * kWidth) {
    const Floats<kWidth> values = load<kWidth>(x + i);
    Floats<kWidth> grads = load<kWidth>(grad + at + i);
#pragma unroll
    for (int v = 0; v < kWidth; ++v) grads[v] = rstd * (grads[v] - values[v] * rstd * mean);
    store(grad_x + at + i, grads);
  }
}

LaunchShape shape_of(const UnitNormRows& call) {
  return {static_cast<unsigned>(divide_up(call.rows.bound, kWarps)), 32 * kWarps};
}

}  // namespace

void launch_unit_norm(const UnitNormRows& call, void* y, cudaStream_t stream) {
  if (call.rows.bound == 0) return;
  const bool vectors = are_whole_vectors(call.dtype, call.size) && are_aligned(call.x, y);
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    launch_early(norm_heads<T, kWidth>, shape_of(call), stream, call, static_cast<T*>(y));
  });
}

void launch_unit_norm_backward(const UnitNormRows& call, const void* grad, void* grad_x,
                               cudaStream_t stream) {
  if (call.rows.bound == 0) return;
  const bool vectors =
      are_whole_vectors(call.dtype, call.size) && are_aligned(call.x, grad, grad_x);
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    launch_early(norm_heads_backward<T, kWidth>, shape_of(call), stream, call,
                 static_cast<const T*>(grad), static_cast<T*>(grad_x));
  });
}

}  // namespace tessera::cuda
