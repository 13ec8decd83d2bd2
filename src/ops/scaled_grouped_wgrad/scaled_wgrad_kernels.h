#pragma once

#include "ops/grouped_matmul/grouped_kernels.h"

namespace tessera::cuda {

/// GroupedWgradParams with byte maps of codes that lie along tokens (token_blocks.h), without
/// gathering.
struct ScaledWgradParams : GroupedWgradParams {
  const float* narrow_scales;  ///< [S, narrow_columns]; S is the number of experts, or of blocks
  const float* wide_scales;    ///< [S, num_columns]
  int narrow_columns;          ///< max g_e
};
/// Scales of experts' tokens, and of blocks of 128.
void launch_scaled_wgrad_rows(const ScaledWgradParams& params, cudaStream_t stream);
void launch_scaled_wgrad_blocks(const ScaledWgradParams& params, cudaStream_t stream);

}  // namespace tessera::cuda
