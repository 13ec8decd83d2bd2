#pragma once

#include "ops/gated_delta/gated_delta_kernels.h"

/// Kimi Delta Attention on GPUs, by the formulas of kda_chunk.h, in F32. A chunk is 64 rows of the
/// packed tokens, wherever sequences begin, as of the gated delta rule: whose operands, starts and
/// lengths these are, but that decays are [T, N, Dk] and each head has keys of its own.
namespace tessera::cuda {

/// Scratch memory. Rows of a chunk are those of its tokens.
struct KdaChunks {
  DeltaMarks marks;  ///< without sums
  float* sums;       ///< [T, N, Dk] G, of g from the first token of the chunk or sequence on
  float* q_kept;     ///< [T, N, Dk] q exp(G); 0 where the sequence begins in the chunk
  float* k_kept;     ///< [T, N, Dk] the same of k
  float* k_rest;     ///< [T, N, Dk] k exp(G_C - G); 0 where the sequence ends in the chunk
  float* kept;       ///< [chunks, N, Dk] what is left of the state before in that behind
  float* a;          ///< [chunks, N, 64, 64], in the backward pass
  float* p;          ///< [chunks, N, 64, 64]
  float* inverse;    ///< [chunks, N, 64, 64] of I + beta A
  float* written;    ///< [T, N, Dv]
  /// [N, Dk, Dv], or [chunks + 1, N, Dk, Dv] where those before all chunks are kept.
  float* states;
  // Of the backward pass.
  float* state_grads;  ///< [chunks, N, Dk, Dv] of the states behind the chunks
  float* of_right;     ///< [T, N, Dv]
  float* scaled;       ///< [N, 64, Dv] -beta times that, of a chunk
};

/// `keeps`: the states before all chunks, and A. `o`: null where only these are wanted.
void launch_kda(const DeltaOperands& x, const KdaChunks& chunks, bool keeps, void* o,
                cudaStream_t stream);

/// REQUIRES launch_kda that keeps states. Gradients of decays are [T, N, Dk].
void launch_kda_backward(const DeltaOperands& x, const KdaChunks& chunks, const DeltaGrads& grads,
                         cudaStream_t stream);

/// What the last step of the backward pass reads and gives.
struct KdaFinishScratch {
  bool in_bf16;  ///< what scans left, else F32
  DeltaMarks marks;
  const float* sums;
  const float* kept;
  float* p;  ///< for the gradient of P
  float* a;  ///< A, in whose place its gradient goes
  const void* written;
  const void* of_right;
  const void* states;
  const void* state_grads;
  float* of_q;  ///< [T, N, Dk] gradients of unit queries and keys
  float* of_k;
  float* of_last;  ///< [chunks, N, Dk] of the last of a chunk's sums of decays
};
void launch_kda_finish(const DeltaOperands& x, const KdaFinishScratch& scratch,
                       const DeltaGrads& grads, cudaStream_t stream);

/// Scratch memory of the kernels for BF16 and sizes that takes_fast_delta takes: as KdaChunks, but
/// with operands of products in BF16.
struct FastKda {
  FastDelta delta;  ///< without totals; rows' factors are 1 but for beta
  DeltaMarks marks;
  float* sums;
  void* q_kept;
  void* k_kept;
  void* k_rest;
  float* kept;
  // Of the backward pass.
  float* a;
  float* p;
  float* of_q;
  float* of_k;
  float* of_last;
};
/// `states` as in FastDeltaForward.
void launch_fast_kda(const DeltaOperands& x, const FastKda& scratch, void* o, float* states,
                     cudaStream_t stream);
void launch_fast_kda_backward(const DeltaOperands& x, const FastKda& scratch,
                              const DeltaGrads& grads, cudaStream_t stream);

}  // namespace tessera::cuda
