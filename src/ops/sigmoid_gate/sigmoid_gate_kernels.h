#pragma once

#include "core/dtype.h"
#include "ops/cuda/rows.h"
#include "ops/sigmoid_gate/gate_function.h"

namespace tessera::cuda {

/// out [rows, width] = y · gate(logit [rows]), or of logit [rows, width]; heads are rows. Logits
/// are of y's type, or F32 where they are factors.
struct SigmoidGateRows {
  DType dtype;
  RowCount rows;
  int64_t width;
  bool of_elements;  ///< each has a gate
  GateFunction function;
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
