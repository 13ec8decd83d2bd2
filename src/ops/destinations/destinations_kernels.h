#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tessera::cuda {

/// See Destinations. Where the extent is null, the bound is the extent.
struct DestinationChoice {
  int64_t num_tokens;
  const int64_t* token_extent;
  int top_k;
  int64_t members;
  int64_t experts_each;
  int64_t first_expert;
  const int32_t* expert_idx;  ///< [T, K]
  int32_t* members_TK;
};
void launch_destinations(const DestinationChoice& choice, cudaStream_t stream);

/// See PermuteChoices.
struct ChoicesOfRows {
  int64_t num_rows;
  const int64_t* row_extent;
  int top_k;
  const int32_t* expert_idx;  ///< [T, K]
  const int32_t* source_R;
  int32_t* choices_RK;
};
void launch_permute_choices(const ChoicesOfRows& choices, cudaStream_t stream);

}  // namespace tessera::cuda
