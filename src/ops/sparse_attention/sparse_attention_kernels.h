#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/dtype.h"

namespace tessera::cuda {

/// Elements of a head that a warp's registers hold.
constexpr int64_t kMostSparseHeadSize = 640;

/// See SparseAttention.
struct SparseQueries {
  DType dtype;
  int64_t num_tokens;
  int64_t num_rows;  ///< of keys and values
  int num_heads;
  int num_kv_heads;
  int head_size;
  int head_size_v;
  int top_k;
  float scale;
  const void* q;
  const void* k;
  const void* v;
  const int32_t* chosen;
};
void launch_sparse_attention(const SparseQueries& call, void* o, float* lse, cudaStream_t stream);

/// What the backward pass has beside those.
struct SparseGrads {
  const void* o;
  const float* lse;
  const void* grad_o;
  const float* grad_lse;  ///< may be null
  float* delta;           ///< scratch: F32 [N, T]
  uint32_t* choosers;     ///< scratch: of each row a bit for each token that chose it
  void* grad_q;
  void* grad_k;
  void* grad_v;
};
/// Words of a row's bits.
constexpr int64_t chooser_words(int64_t num_tokens) {
  return (num_tokens + 31) / 32;
}
void launch_sparse_attention_backward(const SparseQueries& call, const SparseGrads& grads,
                                      cudaStream_t stream);

}  // namespace tessera::cuda
