#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/dtype.h"
#include "ops/cuda/column_sums.h"

/// The scan of ssd_scan.h on GPUs. A chunk is kSsdRows rows of the packed tokens, wherever
/// sequences begin: the decay of a sequence's first token is 0, which keeps nothing of the state
/// before it.
namespace tessera::cuda {

constexpr int kSsdRows = 128;      // of a chunk
constexpr int kMaxSsdWidth = 512;  // of a head, and of a head's state

inline int64_t num_ssd_chunks(int64_t tokens) {
  return (tokens + kSsdRows - 1) / kSsdRows;
}

/// The operands of all passes: x [T,H,P], dt [T,H], b, c [T,G,N]; numbers of heads [H].
struct SsdRows {
  DType dtype;
  int tokens;
  int heads;
  int groups;
  int head_size;
  int state_size;
  float min_step;
  float max_step;  ///< 0: none
  const void* x;
  const void* dt;
  const void* b;
  const void* c;
  const float* a_log;
  const float* skip;
  const float* dt_bias;
  const int32_t* bounds;  ///< sequence s is the rows bounds[s] to bounds[s + 1]; or null:
  int num_sequences;
  const int32_t* start;  ///< one sequence, of which *start tokens came before
};

/// Scratch memory of all passes.
struct SsdMarks {
  float* steps;         ///< [T,H]
  float* decays;        ///< [T,H]: of the state before; 0 where a sequence begins
  float* chunk_decays;  ///< [chunks,H]: their products
  float* states;        ///< [chunks,H,N,P]: before the chunks
};
void launch_ssd_scan(const SsdRows& x, const SsdMarks& marks, void* y, cudaStream_t stream);

/// The same behind the states [H,N,P] of earlier tokens, which move on.
void launch_ssd_scan_cached(const SsdRows& x, const SsdMarks& marks, void* y, float* states,
                            cudaStream_t stream);

/// See SsdScanBatch: sequence s has the rows x.bounds[s] to x.bounds[s + 1].
struct SsdBatch {
  SsdRows x;
  const int32_t* lengths;  ///< [S]
  const int32_t* slots;    ///< [S]
  int num_slots;
  void* y;
  float* states;  ///< [slots,H,N,P]
};
void launch_ssd_scan_batch(const SsdBatch& batch, cudaStream_t stream);

/// Scratch memory of the backward pass beside the marks.
struct SsdBackward {
  float* state_grads;  ///< [chunks,H,N,P]: behind the chunks
  float* of_heads;     ///< [T,H,N]: of B, or of C, of each head
  float* chunk_ends;   ///< [chunks,H]: states times their gradients behind the chunks
  float* reads;        ///< [T,H]: what is read times its gradient, later of A_log
  float* writes;       ///< [T,H]: what is written times its gradient, later of dt_bias
  float* skips;        ///< [T,H]: of D
  float* partials;     ///< column_sums_bytes of H columns
};
struct SsdGrads {
  const void* y;
  void* x;
  void* dt;
  void* b;
  void* c;
  Accumulator a_log;
  Accumulator skip;
  Accumulator dt_bias;
  int num_sms;
};
void launch_ssd_scan_backward(const SsdRows& x, const SsdMarks& marks, const SsdBackward& scratch,
                              const SsdGrads& grads, cudaStream_t stream);

// The steps of which those consist.

void launch_ssd_marks(const SsdRows& x, const SsdMarks& marks, cudaStream_t stream);

/// A vector of each head and token: one of the head, or of its group.
struct SsdVectors {
  const void* data;
  int count;  ///< of vectors of a token
  int size;
  const float* factor;  ///< [T,H], or null for 1
};

/// What a scan gives beside states: nothing, F32 [T,H,own], or rows of the operands' type.
enum class SsdOutput { kStates, kSums, kRows };

/// A pass over each chunk with a matrix s [summed, own] of each head. For token by token, the last
/// one first where it is `reverse`:
///   forward: s = decay · s + write valueᵀ, out = readᵀ s
///   reverse: s = s + write valueᵀ, out = readᵀ s, then s = decay · s
struct SsdPass {
  SsdVectors write;  ///< along the dim that is summed
  SsdVectors value;  ///< along the other
  SsdVectors read;
  bool reverse;
  bool starts_at_states;  ///< or at 0
  SsdOutput output;
  float* states;      ///< where s is taken from, or, for kStates, goes to
  int summed_stride;  ///< of its elements in memory
  int own_stride;
  float* chunk_decays;  ///< written where not null
  void* out;
  const float* out_factor;  ///< [T,H] on rows, or null for 1
};
void launch_ssd_pass(const SsdRows& x, const float* decays, const SsdPass& pass,
                     cudaStream_t stream);

}  // namespace tessera::cuda
