#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/dtype.h"

namespace tessera::cuda {

/// See ShortConvBatch: x and y [tokens, channels], weight [channels, taps], states [slots · taps,
/// channels].
struct ConvBatch {
  DType dtype;
  int64_t tokens;
  int64_t channels;
  int taps;
  const void* x;
  const float* weight;
  const float* bias;       ///< [channels], or null
  const int32_t* bounds;   ///< [S+1]
  const int32_t* lengths;  ///< [S]
  const int32_t* slots;    ///< [S]
  int num_sequences;
  int num_slots;
  bool silu;
  void* y;
  void* states;
};
void launch_short_conv_batch(const ConvBatch& batch, cudaStream_t stream);

}  // namespace tessera::cuda
