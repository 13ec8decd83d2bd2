#pragma once

#include "core/dtype.h"
#include "ops/cuda/column_sums.h"

namespace tessera::cuda {

/// The gated norm of gated_norm.h over `rows` heads of `size` elements.
struct GatedNormRows {
  DType dtype;
  int64_t rows;
  int64_t size;
  float eps;
  const void* x;
  const void* z;
  const float* weight;
  int num_sms;
  bool sigmoid = false;  ///< the gate, not SiLU
};
void launch_gated_norm(const GatedNormRows& call, void* y, cudaStream_t stream);

/// Scratch memory of the backward pass.
int64_t gated_norm_backward_bytes(int64_t rows, int64_t size);

struct GatedNormGrads {
  const void* y;
  void* x;
  void* z;
  Accumulator weight;
  float* scratch;  ///< gated_norm_backward_bytes
};
void launch_gated_norm_backward(const GatedNormRows& call, const GatedNormGrads& grads,
                                cudaStream_t stream);

}  // namespace tessera::cuda
