#pragma once

#include "ops/cuda/column_sums.h"
#include "ops/rope/rope_kernels.h"

namespace tessera::cuda {

/// Elements of a vector: two of them in each lane leave room for enough heads under way.
constexpr int kNormRopeWidth = 4;

/// Lanes that share a head, two vectors in each; 0: a head that these kernels do not take.
constexpr int norm_rope_lanes(int64_t head_size, int64_t offset, int64_t num_pairs,
                              bool interleaved) {
  const int64_t lanes = head_size / (2 * kNormRopeWidth);
  const bool whole = head_size % (2 * kNormRopeWidth) == 0 && offset % kNormRopeWidth == 0 &&
                     num_pairs % kNormRopeWidth == 0;
  const bool fits = lanes == 4 || lanes == 8 || lanes == 16 || lanes == 32;
  return whole && fits && !interleaved ? static_cast<int>(lanes) : 0;
}

/// rope.y = every head of rope.x normed with the weight, then turned.
struct NormRopeRows {
  RopeRows rope;
  const float* weight;
  float* rstd;
  float eps;
};
void launch_norm_rope(const NormRopeRows& call, cudaStream_t stream);

/// rope.x is the gradient, which is turned back, rope.y that of x; the weight's is added into
/// `grad_weight` unless it is null. `partials` has column_partials_bytes(head_size).
struct NormRopeBackwardRows {
  RopeRows rope;
  const void* x;
  const float* weight;
  const float* rstd;
  Accumulator grad_weight;
  float* partials;
  int num_sms;
};
void launch_norm_rope_backward(const NormRopeBackwardRows& call, cudaStream_t stream);

}  // namespace tessera::cuda
