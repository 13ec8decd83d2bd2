#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/router/score_function.h"

/// A token's scores, one warp to a token: lane l holds those of the kPer experts from l · kPer on,
/// experts beyond num_experts being left out of everything.
namespace tessera::cuda {

constexpr unsigned kAllLanes = 0xFFFFFFFFU;
constexpr int kLanes = 32;
/// What keeps a sum of scores from dividing by zero, as in DeepSeek-V3.
constexpr float kShareSumEpsilon = 1e-20F;

/// The sum (largest) over kWidth neighbouring lanes, the same bits in each.
template <int kWidth, typename T>
__device__ __forceinline__ T lanes_sum(T value) {
#pragma unroll
  for (int step = kWidth / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}
template <int kWidth>
__device__ __forceinline__ float lanes_max(float value) {
#pragma unroll
  for (int step = kWidth / 2; step > 0; step /= 2)
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}
/// Over the warp.
template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
  return lanes_sum<kLanes>(value);
}
__device__ __forceinline__ float warp_max(float value) {
  return lanes_max<kLanes>(value);
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

/// What a softmax divides by: exp(largest) · sum.
struct SoftmaxScale {
  float largest;
  float sum;

  __device__ __forceinline__ float log_sum_exp() const { return largest + logf(sum); }
};

template <int kPer>
struct TokenScores {
  /// A row of as many values as lanes hold, in shared memory.
  static constexpr int kRowValues = kPer * kLanes;

  int num_experts;
  int lane;

  __device__ __forceinline__ int expert(int i) const { return lane * kPer + i; }
  __device__ __forceinline__ bool has(int i) const { return expert(i) < num_experts; }

  /// Of num_experts values in the GPU's memory; those of experts beyond are `absent`. Past the L1
  /// cache: other blocks of the launch may have written them.
  __device__ __forceinline__ void load(const float* from, float (&to)[kPer],
                                       float absent = 0) const {
    if constexpr (kPer % 4 == 0) {
      if (by_fours(from)) {
#pragma unroll
        for (int i = 0; i < kPer; i += 4) {
          to[i] = to[i + 1] = to[i + 2] = to[i + 3] = absent;
          if (!has(i)) continue;
          const float4 four = __ldcg(reinterpret_cast<const float4*>(from + expert(i)));
          to[i] = four.x;
          to[i + 1] = four.y;
          to[i + 2] = four.z;
          to[i + 3] = four.w;
        }
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < kPer; ++i) to[i] = has(i) ? __ldcg(from + expert(i)) : absent;
  }
  /// Logits, whose scores are 0 where an expert is absent.
  __device__ __forceinline__ void load_logits(const float* from, float (&to)[kPer]) const {
    load(from, to, -INFINITY);
  }
  __device__ __forceinline__ void store(const float (&values)[kPer], float* to) const {
    if constexpr (kPer % 4 == 0) {
      if (by_fours(to)) {
#pragma unroll
        for (int i = 0; i < kPer; i += 4) {
          if (has(i)) store_four(values + i, to + expert(i));
        }
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (has(i)) to[expert(i)] = values[i];
    }
  }

  /// Of a row of kRowValues in shared memory, aligned to 16 bytes.
  __device__ __forceinline__ void load_row(const float* row, float (&to)[kPer]) const {
#pragma unroll
    for (int i = 0; i < kPer; i += kStep) {
      if constexpr (kStep == 4) {
        load_four(row + expert(i), to + i);
      } else {
        to[i] = row[expert(i)];
      }
    }
  }
  __device__ __forceinline__ void store_row(const float (&values)[kPer], float* row) const {
#pragma unroll
    for (int i = 0; i < kPer; i += kStep) {
      if constexpr (kStep == 4) {
        store_four(values + i, row + expert(i));
      } else {
        row[expert(i)] = values[i];
      }
    }
  }

  /// Softmax of load_logits' logits.
  __device__ __forceinline__ SoftmaxScale softmax(const float (&logits)[kPer],
                                                  float (&to)[kPer]) const {
    float largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < kPer; ++i) largest = fmaxf(largest, logits[i]);
    largest = warp_max(largest);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      to[i] = expf(logits[i] - largest);
      sum += to[i];
    }
    sum = warp_sum(sum);
    const float scale = 1.0F / sum;
#pragma unroll
    for (int i = 0; i < kPer; ++i) to[i] *= scale;
    return {largest, sum};
  }

  /// Scores of one logit each; 0 where an expert is absent.
  __device__ __forceinline__ void separate(ScoreFunction score, const float (&logits)[kPer],
                                           float (&to)[kPer]) const {
    if (score == ScoreFunction::kSqrtSoftplus) {
#pragma unroll
      for (int i = 0; i < kPer; ++i) to[i] = sqrt_softplus(logits[i]);
      return;
    }
#pragma unroll
    for (int i = 0; i < kPer; ++i) to[i] = 1.0F / (1.0F + expf(-logits[i]));
  }

  /// Makes such scores sum to 1; returns their sum before that.
  __device__ __forceinline__ float normalize(const float (&scores)[kPer], float (&to)[kPer]) const {
    const float sum = kShareSumEpsilon + total(scores);
#pragma unroll
    for (int i = 0; i < kPer; ++i) to[i] = scores[i] / sum;
    return sum;
  }

  /// The scores as the balance loss takes them, which sum to 1; returns the sum before that (1 for
  /// softmax).
  __device__ __forceinline__ float shares(ScoreFunction score, const float (&logits)[kPer],
                                          float (&to)[kPer]) const {
    if (score == ScoreFunction::kSoftmax) {
      softmax(logits, to);
      return 1.0F;
    }
    separate(score, logits, to);
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

 private:
  static constexpr int kStep = kPer % 4 == 0 ? 4 : 1;

  __device__ __forceinline__ bool by_fours(const float* values) const {
    return num_experts % 4 == 0 && reinterpret_cast<uintptr_t>(values) % sizeof(float4) == 0;
  }
  static __device__ __forceinline__ void load_four(const float* from, float* to) {
    const float4 four = *reinterpret_cast<const float4*>(from);
    to[0] = four.x;
    to[1] = four.y;
    to[2] = four.z;
    to[3] = four.w;
  }
  static __device__ __forceinline__ void store_four(const float* from, float* to) {
    *reinterpret_cast<float4*>(to) = float4{from[0], from[1], from[2], from[3]};
  }
};

/// The fraction of `sum` assignments that the experts of e's group have.
__device__ __forceinline__ float group_fraction(const float* counts_E, int e, int group_size,
                                                float sum) {
  const float scale = sum > 0 ? 1.0F / sum : 0.0F;
  const int first = e / group_size * group_size;
  float group = 0;
  for (int i = first; i < first + group_size; ++i) group += counts_E[i] * scale;
  return group;
}

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
