#pragma once

#include "core/dtype.h"
#include "ops/cuda/column_sums.h"

namespace tessera::cuda {

/// Gates of `heads` heads of `tokens` tokens: delta_gates.h.
struct DeltaGateRows {
  DType dtype;
  int64_t tokens;
  int64_t heads;
  const void* a;
  const void* b;
  const float* log_decay;
  const float* bias;
};
void launch_delta_gates(const DeltaGateRows& call, float* decay, float* beta, cudaStream_t stream);

struct DeltaGateGrads {
  const float* decay;
  const float* beta;
  void* a;
  void* b;
  Accumulator log_decay;
  Accumulator bias;
  float* partials;  ///< column_sums_bytes of a row
  int num_sms;
};
void launch_delta_gates_backward(const DeltaGateRows& call, const DeltaGateGrads& grads,
                                 cudaStream_t stream);

}  // namespace tessera::cuda
