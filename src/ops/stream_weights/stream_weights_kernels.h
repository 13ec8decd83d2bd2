#pragma once

#include "ops/cuda/column_sums.h"
#include "ops/stream_weights/stream_rule.h"

namespace tessera::cuda {

/// See StreamWeights. Shapes as there; `count` is the number of a token's logits.
struct StreamTokens {
  StreamRule rule;
  int64_t streams;
  int64_t count;
  int64_t tokens;
  const float* logits_TM;
  const float* scale;
  const float* base_M;
};
/// `post` and `comb` are null where streams collapse.
void launch_stream_weights(const StreamTokens& call, float* pre, float* post, float* comb,
                           cudaStream_t stream);

struct StreamTokenGrads {
  const float* pre;
  const float* post;  ///< null where streams collapse, like comb
  const float* comb;
  float* logits_TM;
  float* z_TM;  ///< scratch memory: gradients behind scale and base
  Accumulator scale;
  Accumulator base;
  float* partials;  ///< column_sums_bytes of M
  int num_sms;
};
void launch_stream_weights_backward(const StreamTokens& call, const StreamTokenGrads& grads,
                                    cudaStream_t stream);

}  // namespace tessera::cuda
