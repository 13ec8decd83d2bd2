#pragma once

#include "ops/router/router_kernels.h"

namespace tessera::cuda {

/// A call as router_kernels.h has its products: tokens, elements of all their streams for hidden
/// size, logits for experts.
struct StreamRows {
  RouterShape shape;
  const void* x_TW;
};

/// rstd [T] of the rows, and logits [T, M] = rstd · x · weightᵀ.
void launch_stream_logits(const StreamRows& rows, const float* weight_MW, float eps,
                          float* logits_TM, float* rstd_T, cudaStream_t stream);

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

/// Logits for which one pass over the rows makes both gradients; as four streams have.
constexpr int kFusedStreamLogits = 24;
/// Into how many runs of tokens that pass cuts the weight's gradient.
int stream_grad_splits(const RouterShape& shape);
/// launch_stream_input_grads, and `partials` [splits, M, W] of uᵀ · x. REQUIRES at most
/// kFusedStreamLogits logits and a token.
void launch_fused_stream_grads(const StreamInputGrads& grads, float* partials, cudaStream_t stream);

}  // namespace tessera::cuda
