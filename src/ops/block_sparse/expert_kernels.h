#pragma once

#include "ops/grouped_matmul/expert_values.h"

/// Products with the block-diagonal matrix of a layer's experts on Hopper's tensor cores: the
/// grouped ones, tile by tile (grouped_pipeline.cuh, grouped_wgrad.cuh).
namespace tessera::cuda {

/// values = a · W_eᵀ (`gives_values`: SDD) or y = values · W_e (DSD). `weight_by_rows`: the weight
/// is [Σ g_e, H], else [H, Σ g_e]. Boxes of the values have kGroupedStoreRows rows where they are
/// given, else kGroupedBoxRows; those of the weight kGroupedFeatures rows where a tile's features
/// are rows of it, else kGroupedReduction.
void launch_expert_rows(const ExpertRowsParams& params, bool gives_values, bool weight_by_rows,
                        cudaStream_t stream);

/// grad [Σ g_e, H] (+)= values_eᵀ · dense_e (DSᵀD), or grad [H, Σ g_e] (+)= dense_eᵀ · values_e
/// (DDᵀS): of the base, the map `wide` or `narrow` is that of the dense rows.
void launch_expert_wgrad(const ExpertWgradParams& params, bool grad_by_rows, cudaStream_t stream);

}  // namespace tessera::cuda
