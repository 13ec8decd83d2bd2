// A block takes a group of a token and reads it twice, the second time from its cache.
#include <algorithm>

#include "ops/cuda/activation_math.cuh"
#include "ops/cuda/column_sums.cuh"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/gated_norm/gated_group_norm_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kMaxThreads = 256;

/// The sum over a block's threads, the same bits in each; all must call, and `shared` has a float
/// a warp.
__device__ __forceinline__ float sum_block(float x, float* shared) {
  x = sum_lanes(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  float total = 0;
  for (int warp = 0; warp < static_cast<int>(blockDim.x) / 32; ++warp) total += shared[warp];
  return total;
}

/// A vector of a group.
template <int kWidth>
struct GroupVector {
  Floats<kWidth> x;
  Floats<kWidth> z;

  __device__ __forceinline__ float gated(int i) const { return x[i] * Silu::value(z[i]); }
  __device__ __forceinline__ float squares() const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum += gated(i) * gated(i);
    return sum;
  }
};

template <typename T, int kWidth>
__device__ __forceinline__ GroupVector<kWidth> load_group(const GroupNormRows& call, int64_t at) {
  return {load<kWidth>(static_cast<const T*>(call.x) + at),
          load<kWidth>(static_cast<const T*>(call.z) + at)};
}

__device__ __forceinline__ float group_deviation(float squares, const GroupNormRows& call) {
  return 1.0F / sqrtf(squares / static_cast<float>(call.size) + call.eps);
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kMaxThreads)
    norm_groups(const __grid_constant__ GroupNormRows call, T* y) {
  wait_for_earlier();
  __shared__ float shared[kMaxThreads / 32];
  const int64_t row = blockIdx.x;
  const int64_t first = row * call.size;
  const float* weight = call.weight + row % call.groups * call.size;
  const int64_t step = static_cast<int64_t>(blockDim.x) * kWidth;
  float squares = 0;
  for (int64_t i = threadIdx.x * kWidth; i < call.size; i += step)
    squares += load_group<T, kWidth>(call, first + i).squares();
  const float rstd = group_deviation(sum_block(squares, shared), call);
  for (int64_t i = threadIdx.x * kWidth; i < call.size; i += step) {
    const GroupVector<kWidth> vector = load_group<T, kWidth>(call, first + i);
    Floats<kWidth> out = load<kWidth>(weight + i);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) out[j] *= vector.gated(j) * rstd;
    store_once(y + first + i, out);
  }
}

struct GroupNormBackwardParams {
  GroupNormRows call;
  const void* grad;
  void* grad_x;
  void* grad_z;
  float* deviations;
};

template <typename T, int kWidth>
__global__ void __launch_bounds__(kMaxThreads)
    norm_groups_backward(const __grid_constant__ GroupNormBackwardParams p) {
  wait_for_earlier();
  __shared__ float shared[kMaxThreads / 32];
  const GroupNormRows& call = p.call;
  const int64_t row = blockIdx.x;
  const int64_t first = row * call.size;
  const float* weight = call.weight + row % call.groups * call.size;
  const T* grads = static_cast<const T*>(p.grad) + first;
  const int64_t step = static_cast<int64_t>(blockDim.x) * kWidth;
  float squares = 0;
  float dot = 0;
  for (int64_t i = threadIdx.x * kWidth; i < call.size; i += step) {
    const GroupVector<kWidth> vector = load_group<T, kWidth>(call, first + i);
    const Floats<kWidth> grad = load<kWidth>(grads + i);
    const Floats<kWidth> w = load<kWidth>(weight + i);
    squares += vector.squares();
#pragma unroll
    for (int j = 0; j < kWidth; ++j) dot += grad[j] * w[j] * vector.gated(j);
  }
  const float rstd = group_deviation(sum_block(squares, shared), call);
  const float shift = sum_block(dot, shared) * rstd * rstd / static_cast<float>(call.size);
  if (threadIdx.x == 0) p.deviations[row] = rstd;
  for (int64_t i = threadIdx.x * kWidth; i < call.size; i += step) {
    const GroupVector<kWidth> vector = load_group<T, kWidth>(call, first + i);
    const Floats<kWidth> grad = load<kWidth>(grads + i);
    const Floats<kWidth> w = load<kWidth>(weight + i);
    Floats<kWidth> of_x;
    Floats<kWidth> of_z;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float of_gated = (grad[j] * w[j] - vector.gated(j) * shift) * rstd;
      const Slope slope = Silu::slope(vector.z[j]);
      of_x[j] = of_gated * slope.value;
      of_z[j] = of_gated * vector.x[j] * slope.derivative;
    }
    store_once(static_cast<T*>(p.grad_x) + first + i, of_x);
    store_once(static_cast<T*>(p.grad_z) + first + i, of_z);
  }
}

/// What tokens add to the gradient of the weight.
template <typename T, int kWidth>
struct GroupNormTerms {
  struct Loaded {
    Pack<T, kWidth> x;
    Pack<T, kWidth> z;
    Pack<T, kWidth> grad;
    float rstd;
  };

  int64_t groups;
  int64_t size;
  const T* x;
  const T* z;
  const T* grad;
  const float* deviations;

  __device__ __forceinline__ Loaded load(int64_t row, int64_t column) const {
    const int64_t at = row * groups * size + column;
    return {load_pack<kWidth>(x + at), load_pack<kWidth>(z + at), load_pack<kWidth>(grad + at),
            deviations[row * groups + column / size]};
  }
  __device__ __forceinline__ void add(const Loaded& loaded, Floats<kWidth>& sums) const {
    const GroupVector<kWidth> vector = {to_floats(loaded.x), to_floats(loaded.z)};
    const Floats<kWidth> grads = to_floats(loaded.grad);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sums[i] += grads[i] * vector.gated(i) * loaded.rstd;
  }
};

/// As many threads as a group has vectors, in whole warps.
LaunchShape group_shape(const GroupNormRows& call, int width) {
  const int64_t warps = divide_up(call.size, static_cast<int64_t>(width) * 32);
  const auto threads = static_cast<unsigned>(std::min<int64_t>(warps * 32, kMaxThreads));
  return {static_cast<unsigned>(call.tokens * call.groups), threads};
}

}  // namespace

void launch_gated_group_norm(const GroupNormRows& call, void* y, cudaStream_t stream) {
  if (call.tokens == 0) return;
  const bool vectors =
      are_whole_vectors(call.dtype, call.size) && are_aligned(call.x, call.z, call.weight, y);
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    launch_early(norm_groups<T, kWidth>, group_shape(call, kWidth), stream, call,
                 static_cast<T*>(y));
  });
}

void launch_gated_group_norm_backward(const GroupNormRows& call, const GroupNormGrads& grads,
                                      cudaStream_t stream) {
  if (call.tokens == 0) return;
  const bool vectors = are_whole_vectors(call.dtype, call.size) &&
                       are_aligned(call.x, call.z, call.weight, grads.y, grads.x, grads.z);
  const GroupNormBackwardParams params = {.call = call,
                                          .grad = grads.y,
                                          .grad_x = grads.x,
                                          .grad_z = grads.z,
                                          .deviations = grads.deviations};
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    launch_early(norm_groups_backward<T, kWidth>, group_shape(call, kWidth), stream, params);
    if (grads.weight.sums == nullptr) return;
    const GroupNormTerms<T, kWidth> terms{call.groups,
                                          call.size,
                                          static_cast<const T*>(call.x),
                                          static_cast<const T*>(call.z),
                                          static_cast<const T*>(grads.y),
                                          grads.deviations};
    launch_sum_columns<kWidth>(terms, {.bound = call.tokens}, call.groups * call.size, grads.weight,
                               grads.partials, grads.num_sms, stream);
  });
}

}  // namespace tessera::cuda
