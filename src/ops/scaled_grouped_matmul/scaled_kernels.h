#pragma once

#include "ops/grouped_matmul/grouped_kernels.h"

namespace tessera::cuda {

/// Rows of the weight that one copy brings where blocks have scales; kGroupedFeatures where rows
/// do.
constexpr int kScaledBlocksBoxRows = 64;

/// GroupedRowsParams with byte maps, without gathering.
struct ScaledRowsParams : GroupedRowsParams {
  const float* a_scales;       ///< by row: [R]; by block: [R, num_blocks]
  const float* weight_scales;  ///< by row: [Σ g_e]; by block: [Σ g_e / 128, num_blocks]
  int num_blocks;              ///< of 128 along the reduction
};
/// Scales of rows, and of blocks.
void launch_scaled_rows(const ScaledRowsParams& params, cudaStream_t stream);
void launch_scaled_blocks(const ScaledRowsParams& params, cudaStream_t stream);

}  // namespace tessera::cuda
