#pragma once

#include "core/dtype.h"
#include "ops/cuda/column_sums.h"

namespace tessera::cuda {

/// The norm of gated_group_norm.h over `tokens` rows of `groups` groups of `size` elements.
struct GroupNormRows {
  DType dtype;
  int64_t tokens;
  int64_t groups;
  int64_t size;
  float eps;
  const void* x;
  const void* z;
  const float* weight;  ///< [groups, size]
};
void launch_gated_group_norm(const GroupNormRows& call, void* y, cudaStream_t stream);

struct GroupNormGrads {
  const void* y;
  void* x;
  void* z;
  Accumulator weight;
  float* deviations;  ///< [tokens, groups]
  float* partials;    ///< column_sums_bytes
  int num_sms;
};
void launch_gated_group_norm_backward(const GroupNormRows& call, const GroupNormGrads& grads,
                                      cudaStream_t stream);

}  // namespace tessera::cuda
