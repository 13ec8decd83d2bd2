#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/dtype.h"

/// The gated delta rule on GPUs, by the formulas of delta_chunk.h. A chunk is 64 rows of the packed
/// tokens, wherever sequences begin: what tokens of one sequence give another is 0, and a chunk in
/// which one begins keeps nothing of the state before it. So the number of chunks depends on that
/// of the tokens alone.
namespace tessera::cuda {

constexpr int kDeltaRows = 64;  // of a chunk
constexpr int kDeltaSquare = kDeltaRows * kDeltaRows;
constexpr float kDeltaUnitEps = 1e-6F;  // kUnitEps

inline int64_t num_delta_chunks(int64_t tokens) {
  return (tokens + kDeltaRows - 1) / kDeltaRows;
}

/// The operands of all passes: q, k [T, Nk, Dk], v [T, N, Dv], decay and beta [T, N]; or with a
/// decay for each element of a key [T, N, Dk], which has kernels of its own (ops/kda) but for those
/// of marks and batches.
struct DeltaOperands {
  DType dtype;
  int tokens;
  int key_heads;
  int heads;
  int key_size;
  int value_size;
  const void* q;
  const void* k;
  const void* v;
  const float* decay;
  const float* beta;
  const int32_t* bounds;  ///< sequence s is the rows bounds[s] to bounds[s + 1]; or null:
  int num_sequences;
  const int32_t* start;  ///< one sequence, of which *start tokens came before

#ifdef __CUDACC__
  __host__ __device__ int num_chunks() const {
    return (tokens + kDeltaRows - 1) / kDeltaRows;
  }
  __device__ int key_head(int head) const {
    return head / (heads / key_heads);
  }
  __device__ int64_t key_stride() const {
    return static_cast<int64_t>(key_heads) * key_size;
  }
  __device__ int64_t value_stride() const {
    return static_cast<int64_t>(heads) * value_size;
  }
  __device__ int64_t key_at(int64_t token, int head) const {
    return token * key_stride() + static_cast<int64_t>(head) * key_size;
  }
  __device__ int64_t value_at(int64_t token, int head) const {
    return token * value_stride() + static_cast<int64_t>(head) * value_size;
  }
#endif
};

/// Factors of a chunk's rows, of one value head; 0 in rows that are not there.
struct DeltaFactors {
  float sums[kDeltaRows];  ///< G, from the first token of the chunk or sequence on
  float beta[kDeltaRows];
  float q_inverse[kDeltaRows];  ///< over |q| and sqrt(Dk)
  float k_inverse[kDeltaRows];
  float reads[kDeltaRows];   ///< exp(G_i), what is left of the state before; 0 where none is
  float writes[kDeltaRows];  ///< exp(G_C - G_j) towards the state behind the chunk; or 0
  int starts[kDeltaRows];
  float kept;  ///< of the state before in that behind
  int count;
  int unused[2];  // so that vectors of 16 bytes copy it
};

/// Where each token's sequence begins [T]; -1: before these tokens.
void launch_delta_starts(const DeltaOperands& x, int32_t* starts, cudaStream_t stream);

/// What all chunks' kernels read of tokens.
struct DeltaMarks {
  int32_t* starts;   ///< [T]
  float* q_inverse;  ///< [T, Nk] 1 / |q|
  float* k_inverse;  ///< [T, Nk]
  float* sums;       ///< [T, N] of g, from the first token of the chunk or sequence on
};
/// `q_inverse` and `k_inverse` alone.
void launch_delta_lengths(const DeltaOperands& x, const DeltaMarks& marks, cudaStream_t stream);
void launch_delta_marks(const DeltaOperands& x, const DeltaMarks& marks, cudaStream_t stream);

/// From gradients of unit vectors, one for each value head [T, N, Dk], those of q and k.
struct DeltaUnitGrads {
  const float* of_q;
  const float* of_k;
  void* q;
  void* k;
};
void launch_delta_unit_grads(const DeltaOperands& x, const DeltaMarks& marks,
                             const DeltaUnitGrads& grads, cudaStream_t stream);

/// Scratch memory of the kernels for all sizes, in F32. States are [Dk, Dv].
struct ExactDelta {
  DeltaMarks marks;
  float* inverse;  ///< [chunks, N, 64, 64] of I + A
  float* p;        ///< [chunks, N, 64, 64]
  float* written;  ///< [T, N, Dv]
  float* scaled;   ///< [N, 64, Dv] twice
  /// [N, Dk, Dv], or [chunks + 1, N, Dk, Dv] where those before all chunks are kept.
  float* states;
  // Of the backward pass.
  float* square;       ///< [chunks, N, 64, 64]
  float* state_grads;  ///< [chunks, N, Dk, Dv] of the states behind the chunks
  float* of_right;     ///< [T, N, Dv]
  float* of_q;         ///< [T, N, Dk]
  float* of_k;         ///< [T, N, Dk]
};
/// `o`: null where only states are wanted.
void launch_exact_delta(const DeltaOperands& x, const ExactDelta& scratch, bool keeps, void* o,
                        cudaStream_t stream);

struct DeltaGrads {
  const void* o;
  void* q;
  void* k;
  void* v;
  float* decay;
  float* beta;
};
/// REQUIRES launch_exact_delta that keeps the states.
void launch_exact_delta_backward(const DeltaOperands& x, const ExactDelta& scratch,
                                 const DeltaGrads& grads, cudaStream_t stream);

/// Whether the kernels on tensor cores take these sizes.
bool takes_fast_delta(DType dtype, int64_t key_size, int64_t value_size);

/// Scratch memory of the kernels for BF16 on tensor cores, which is BF16 but for factors.
struct FastDelta {
  int32_t* starts;        ///< [T]
  DeltaFactors* factors;  ///< [chunks, N]
  void* inverse;          ///< [chunks, N, 64, 64] of I + A
  void* p_inverse;        ///< [chunks, N, 64, 64] P times that
  // Of the backward pass.
  void* states;       ///< [chunks, N, Dk, Dv] before the chunks
  void* state_grads;  ///< [chunks, N, Dk, Dv] of those behind
  void* written;      ///< [T, N, Dv]
  void* of_right;     ///< [T, N, Dv]
  /// F32 [kDeltaFinishBlocks, 3, 64, Dk]: gradients of q, and of k in two parts, between value
  /// heads.
  float* totals;
};
constexpr int kDeltaFinishBlocks = 160;  ///< most blocks of the last step

/// `states`: F32 [N, Dk, Dv] of one sequence that go on, or null; `num_sms` the GPU's.
struct FastDeltaForward {
  void* o;
  float* states;
  int num_sms;
};
void launch_fast_delta(const DeltaOperands& x, const FastDelta& scratch,
                       const FastDeltaForward& forward, cudaStream_t stream);
void launch_fast_delta_backward(const DeltaOperands& x, const FastDelta& scratch,
                                const DeltaGrads& grads, int num_sms, cudaStream_t stream);
/// Parts of the above: what chunks need of their own keys, with all factors; all gradients from
/// what both scans left.
void launch_fast_delta_chunks(const DeltaOperands& x, const FastDelta& scratch,
                              cudaStream_t stream);
void launch_fast_delta_finish(const DeltaOperands& x, const FastDelta& scratch,
                              const DeltaGrads& grads, int num_sms, cudaStream_t stream);

/// Tokens of several sequences that go on from the states in their slots: see GatedDeltaBatch. Of
/// the operands, sequences are not read.
constexpr int64_t kMostBatchKeySize = 256;
struct DeltaBatch {
  DeltaOperands x;
  const int32_t* bounds;   ///< [S+1]
  const int32_t* lengths;  ///< [S]
  const int32_t* slots;    ///< [S]
  int num_sequences;
  int num_slots;
  float* states;
  void* o;
  bool decays_by_element = false;  ///< of keys, not by head
};
void launch_delta_batch(const DeltaBatch& batch, cudaStream_t stream);

}  // namespace tessera::cuda
