#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/dtype.h"

namespace tessera::cuda {

constexpr int kMaxBiasSizes = 1024;

/// The experts of a call, whose rows follow one another.
struct BiasExperts {
  int count;
  const int64_t* offsets;  ///< I64 [count + 1], of their rows
  int size;                ///< of every expert's bias; the largest where they differ
  bool differ;
  int starts[kMaxBiasSizes + 1];  ///< where they differ: where each begins

#ifdef __CUDACC__
  __device__ __forceinline__ int start_of(int expert) const {
    return differ ? starts[expert] : expert * size;
  }
  __device__ __forceinline__ int size_of(int expert) const {
    return differ ? starts[expert + 1] - starts[expert] : size;
  }
#endif
};

/// The rows: of a matrix [max_rows, width], or of block-sparse values where row_offsets is not
/// null.
struct BiasRows {
  DType dtype;
  int64_t max_rows;
  int64_t width;
  int first_column;
  int block_size;
  const int32_t* row_offsets;
  const float* probs;  ///< [max_rows], or null: 1
};

/// y = x + prob · bias.
void launch_expert_bias(const BiasRows& rows, const BiasExperts& experts, const void* x,
                        const float* bias, void* y, cudaStream_t stream);

/// grad_probs [rows] = Σ grad · bias; null: not wanted. grad_bias += Σ prob · grad; likewise.
struct ExpertBiasGrads {
  const void* grad;
  const float* bias;
  float* grad_probs;
  float* grad_bias;
};
void launch_expert_bias_backward(const BiasRows& rows, const BiasExperts& experts,
                                 const ExpertBiasGrads& grads, cudaStream_t stream);

}  // namespace tessera::cuda
