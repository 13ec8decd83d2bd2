#pragma once

#include "core/dtype.h"
#include "ops/cuda/column_sums.h"

namespace tessera::cuda {

/// The convolution of short_conv.h over rows of `channels`.
struct ConvRows {
  DType dtype;
  int64_t tokens;
  int64_t channels;
  int taps;
  const void* x;
  const float* weight;
  const float* bias;  ///< or null
  bool silu = true;
};
/// Sequence s is the rows bounds[s] to bounds[s + 1].
struct ConvSequences {
  const int32_t* bounds;
  int count;
};
void launch_short_conv(const ConvRows& call, const ConvSequences& sequences, void* y,
                       cudaStream_t stream);

/// Parts of the tokens whose gradients of the weights are summed apart.
int conv_parts(int64_t tokens);

struct ConvGrads {
  const void* y;
  void* x;
  Accumulator weight;
  Accumulator bias;
  float* partials;       ///< [conv_parts, channels, taps]
  float* bias_partials;  ///< [conv_parts, channels]
};
void launch_short_conv_backward(const ConvRows& call, const ConvSequences& sequences,
                                const ConvGrads& grads, cudaStream_t stream);

/// Behind *start earlier tokens, the last of which `state` [taps, channels] has.
void launch_short_conv_cached(const ConvRows& call, const int32_t* start, void* y, void* state,
                              cudaStream_t stream);

}  // namespace tessera::cuda
