#pragma once

#include <cuda_runtime.h>

#include <cstdint>

/// Rows between tokens and experts on the GPU. Where an extent is null, the bound is the extent.
namespace tessera::cuda {

enum class RowType { kF32, kBf16 };

/// Both maps; see permute.h.
struct RowMaps {
  const int32_t* row_of_TK;
  const int32_t* source_R;
  int64_t num_tokens;  ///< the bound
  int64_t num_rows;    ///< the bound
  const int64_t* token_extent;
  const int64_t* row_extent;
  int top_k;
};

/// rows[r] = x[source_R[r] / K], 0 for padding.
struct PermuteRows {
  RowMaps maps;
  int64_t row_bytes;
  const void* x_TH;
  void* rows_RH;
};
void launch_permute(const PermuteRows& permute, cudaStream_t stream);

/// out[t] = Σ_k p_tk · y[row_of[t, k]], in order of k, + addend[t].
struct CombineRows {
  RowMaps maps;
  RowType type;
  int64_t width;
  const void* y_RH;
  const float* probs_TK;  ///< null: each row counts once
  const void* addend_TH;  ///< null: zero
  void* out_TH;
};
void launch_combine(const CombineRows& combine, cudaStream_t stream);

/// grad_y[r] = p · grad[t] (0 for padding) and grad_probs[t, k] = ⟨y[r], grad[t]⟩ (0 without a
/// row). The maps' row_of_TK is made from source_R in `row_of_TK`.
struct CombineBackward {
  RowMaps maps;
  RowType type;
  int64_t width;
  const void* grad_TH;
  const void* y_RH;
  const float* probs_TK;
  int32_t* row_of_TK;  ///< scratch memory [T, K]
  void* grad_y_RH;
  float* grad_probs_TK;
};
void launch_combine_backward(const CombineBackward& backward, cudaStream_t stream);

/// to[i] = from[idx[i]], 0 where the index is negative.
struct GatherValues {
  int64_t count;          ///< rows of idx, the bound
  const int64_t* extent;  ///< of these
  int per_row;            ///< values of each
  const float* from;
  const int32_t* idx;
  float* to;
};
void launch_gather_values(const GatherValues& gather, cudaStream_t stream);

}  // namespace tessera::cuda
