#pragma once

#include "core/dtype.h"
#include "ops/cuda/rows.h"

namespace tessera::cuda {

/// out [rows, width] = y · sigmoid(logit [rows]), or of logit [rows, width].
struct SigmoidGateRows {
  DType dtype;
  RowCount rows;
  int64_t width;
  bool of_elements;  ///< each has a gate
  const void* y;
  const void* logit;
};
void launch_sigmoid_gate(const SigmoidGateRows& call, void* out, cudaStream_t stream);

struct SigmoidGateGrads {
  const void* grad;
  void* grad_y;
  void* grad_logit;
};
void launch_sigmoid_gate_backward(const SigmoidGateRows& call, const SigmoidGateGrads& grads,
                                  cudaStream_t stream);

}  // namespace tessera::cuda
