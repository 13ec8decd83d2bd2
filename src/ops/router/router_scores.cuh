#pragma once

#include <cuda_runtime.h>

#include <cstdint>

/// A token's scores, one warp to a token: lane l holds those of experts l, l + 32, ... in an array
/// of kPer, experts beyond num_experts being left out of everything.
namespace tessera::cuda {

constexpr unsigned kAllLanes = 0xFFFFFFFFU;
constexpr int kLanes = 32;
/// What keeps a sum of scores from dividing by zero, as in DeepSeek-V3.
constexpr float kShareSumEpsilon = 1e-20F;

/// The sum (largest) over the warp, the same bits in every lane.
template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2)
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}

/// The sum over a block of kThreads, in one order, to every thread; `scratch` has room for kThreads
/// / 32 values and is free again after the next barrier.
template <int kThreads, typename T>
__device__ __forceinline__ T block_sum(T value, T* scratch) {
  value = warp_sum(value);
  __syncthreads();
  if (threadIdx.x % kLanes == 0) scratch[threadIdx.x / kLanes] = value;
  __syncthreads();
  T sum = 0;
  for (int i = 0; i < kThreads / kLanes; ++i) sum += scratch[i];
  return sum;
}

template <int kPer>
struct TokenScores {
  int num_experts;
  int lane;

  __device__ __forceinline__ int expert(int i) const { return i * kLanes + lane; }
  __device__ __forceinline__ bool has(int i) const { return expert(i) < num_experts; }

  __device__ __forceinline__ void load(const float* from, float (&to)[kPer]) const {
#pragma unroll
    for (int i = 0; i < kPer; ++i) to[i] = has(i) ? from[expert(i)] : 0.0F;
  }

  /// Softmax of the logits; returns their log-sum-exp.
  __device__ __forceinline__ float softmax(const float (&logits)[kPer], float (&to)[kPer]) const {
    float largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (has(i)) largest = fmaxf(largest, logits[i]);
    }
    largest = warp_max(largest);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      to[i] = has(i) ? expf(logits[i] - largest) : 0.0F;
      sum += to[i];
    }
    sum = warp_sum(sum);
    const float scale = 1.0F / sum;
#pragma unroll
    for (int i = 0; i < kPer; ++i) to[i] *= scale;
    return largest + logf(sum);
  }

  __device__ __forceinline__ void sigmoid(const float (&logits)[kPer], float (&to)[kPer]) const {
#pragma unroll
    for (int i = 0; i < kPer; ++i) to[i] = has(i) ? 1.0F / (1.0F + expf(-logits[i])) : 0.0F;
  }

  /// Makes sigmoid scores sum to 1; returns their sum before that.
  __device__ __forceinline__ float normalize(const float (&scores)[kPer], float (&to)[kPer]) const {
    const float sum = kShareSumEpsilon + total(scores);
#pragma unroll
    for (int i = 0; i < kPer; ++i) to[i] = scores[i] / sum;
    return sum;
  }

  /// The scores as the balance loss takes them, which sum to 1; returns the sum before that (1 for
  /// softmax).
  __device__ __forceinline__ float shares(bool of_sigmoid, const float (&logits)[kPer],
                                          float (&to)[kPer]) const {
    if (!of_sigmoid) {
      softmax(logits, to);
      return 1.0F;
    }
    sigmoid(logits, to);
    return normalize(to, to);
  }

  __device__ __forceinline__ float total(const float (&values)[kPer]) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) sum += values[i];
    return warp_sum(sum);
  }
  __device__ __forceinline__ float dot(const float (&a)[kPer], const float (&b)[kPer]) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) sum += a[i] * b[i];
    return warp_sum(sum);
  }
};

/// The segment of a token: cu_seqlens rise from 0 to the number of tokens.
__device__ __forceinline__ int64_t segment_of(const int32_t* cu_seqlens, int64_t num_segments,
                                              int64_t token) {
  int64_t low = 0;
  int64_t high = num_segments;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (cu_seqlens[middle] <= token) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

/// Calls run.template operator()<kPer>() with the least kPer whose lanes hold num_experts, at most
/// 1024.
template <typename Run>
void with_experts_per_lane(int num_experts, Run run) {
  if (num_experts <= 32) return run.template operator()<1>();
  if (num_experts <= 64) return run.template operator()<2>();
  if (num_experts <= 128) return run.template operator()<4>();
  if (num_experts <= 256) return run.template operator()<8>();
  if (num_experts <= 512) return run.template operator()<16>();
  return run.template operator()<32>();
}

}  // namespace tessera::cuda
