#pragma once

#include "core/dtype.h"
#include "ops/cuda/rows.h"

namespace tessera::cuda {

/// Elements of a head's parts, and the four tensors of LatentHeads: kv [rows, heads · (nope +
/// value)], shared [rows, rope], keys [rows, heads · (nope + rope)], values [rows, heads · value].
struct LatentHeadsSizes {
  DType dtype;
  RowCount rows;
  int num_heads;
  int nope;
  int rope;
  int value;
};
struct LatentHeadsForward {
  const void* kv;
  const void* shared;
  void* keys;
  void* values;
};
void launch_latent_heads(const LatentHeadsSizes& sizes, const LatentHeadsForward& call,
                         cudaStream_t stream);

/// The gradients of the same.
struct LatentHeadsGrads {
  const void* keys;
  const void* values;
  void* kv;
  void* shared;
};
void launch_latent_heads_backward(const LatentHeadsSizes& sizes, const LatentHeadsGrads& call,
                                  cudaStream_t stream);

}  // namespace tessera::cuda
