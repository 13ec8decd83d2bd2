#pragma once

#include "ops/router/router_kernels.h"

namespace tessera::cuda {

/// A call as router_kernels.h has its products: tokens, elements of all their streams for hidden
/// size, logits for experts.
struct StreamRows {
  RouterShape shape;
  const void* x_TW;
};

/// rstd of the rows, by which the products x · weightᵀ in `logits_TM` are multiplied.
void launch_norm_stream_logits(const StreamRows& rows, float eps, float* logits_TM, float* rstd_T,
                               cudaStream_t stream);

/// u = rstd · grad [T, M], and what x is multiplied by in its gradient, rstd²/W · Σ grad · logits.
struct StreamLogitFactors {
  RouterShape shape;
  const float* logits_TM;
  const float* rstd_T;
  const float* grad_TM;
  float* scaled_TM;
  float* pulls_T;
};
void launch_stream_logit_factors(const StreamLogitFactors& factors, cudaStream_t stream);

/// dx = u · weight - pull · x + addend, which may be null.
struct StreamInputGrads {
  StreamRows rows;
  const float* weight_MW;
  const float* scaled_TM;
  const float* pulls_T;
  const void* addend_TW;
  void* grad_TW;
};
void launch_stream_input_grads(const StreamInputGrads& grads, cudaStream_t stream);

}  // namespace tessera::cuda
