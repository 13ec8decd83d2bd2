#pragma once

#include "core/dtype.h"
#include "ops/cuda/column_sums.h"

namespace tessera::cuda {

/// Gates of `heads` heads of `tokens` tokens, with `size` decays each: kda_gates.h.
struct KdaGateRows {
  DType dtype;
  int64_t tokens;
  int64_t heads;
  int64_t size;
  const void* a;
  const void* b;
  const float* log_decay;
  const float* bias;

#ifdef __CUDACC__
  __host__ __device__ int64_t width() const {
    return heads * size;
  }
#endif
};
void launch_kda_gates(const KdaGateRows& call, float* decay, float* beta, cudaStream_t stream);

struct KdaGateGrads {
  const float* decay;
  const float* beta;
  void* a;
  void* b;
  Accumulator log_decay;
  Accumulator bias;
  float* partials;  ///< column_sums_bytes of a row of `a`
  float* rates;     ///< scratch: a row
  int num_sms;
};
void launch_kda_gates_backward(const KdaGateRows& call, const KdaGateGrads& grads,
                               cudaStream_t stream);

}  // namespace tessera::cuda
