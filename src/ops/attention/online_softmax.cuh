#pragma once

#include "ops/cuda/ptx/fast_exp.cuh"

namespace tessera::cuda::attention {

/// This thread's two rows of an accumulator in the online softmax. The greatest scores are not
/// scaled yet.
struct Softmax {
  float to_log2;  // what scores are multiplied by
  float max[2];
  float sum[2];  // this thread's columns alone
  float rescale[2];

  /// `least` is finite where a row's first scores may all be minus infinity.
  __device__ __forceinline__ void clear(float least = -INFINITY) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      max[half] = least;
      sum[half] = 0;
    }
  }

  /// Scores become probabilities relative to the present max.
  template <int kScores>
  __device__ __forceinline__ void add(float (&scores)[kScores]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float now = max[half];
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j)
        now = fmaxf(now, fmaxf(scores[4 * j + 2 * half], scores[4 * j + 2 * half + 1]));
      now = fmaxf(now, __shfl_xor_sync(~0U, now, 1));
      now = fmaxf(now, __shfl_xor_sync(~0U, now, 2));
      rescale[half] = fast_exp2((max[half] - now) * to_log2);
      max[half] = now;
      const float shift = -now * to_log2;
      float own_sum = 0;
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = scores[4 * j + 2 * half + i];
          score = fast_exp2(fmaf(score, to_log2, shift));
          own_sum += score;
        }
      }
      sum[half] = sum[half] * rescale[half] + own_sum;
    }
  }
  __device__ __forceinline__ float row_sum(int half) const {
    float all = sum[half] + __shfl_xor_sync(~0U, sum[half], 1);
    return all + __shfl_xor_sync(~0U, all, 2);
  }
};

template <int kCount>
__device__ __forceinline__ void rescale(float (&d)[kCount], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) d[i] *= factor[i / 2 % 2];
}

}  // namespace tessera::cuda::attention
