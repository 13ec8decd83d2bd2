#pragma once

#include "ops/grouped_matmul/grouped_kernels.h"

namespace tessera::cuda {

/// What the kernels that work on an activation's gate and up columns can do, for their callers to
/// check.
constexpr int kActivatedBoxTokens = 48;     ///< rows that one copy of tokens brings
constexpr int kActivatedStoreColumns = 32;  ///< features that one store of FC1's results writes
constexpr int kProbPartialFeatures =
    16;  ///< that one partial sum of a probability's gradient is of

/// FC1 and its activation. Experts have one size F, a multiple of 8. The map `weight` is of the
/// experts' pairs of rows (make_pairs_map, boxes of kGroupedFeatures rows); y is the pre-activation
/// [R, 2 F], null where nobody reads it; its map's boxes and act's have kGroupedStoreRows by
/// kActivatedStoreColumns.
struct ActivatedRowsParams : GroupedRowsParams {
  CUtensorMap act_map;
  void* act;           ///< [R, F]
  const float* probs;  ///< [R], or null: 1
};
/// act = silu(gate) · up · prob, of the rounded gate and up.
void launch_activated_rows(const ActivatedRowsParams& params, cudaStream_t stream);

/// The gradient of FC2's input, and that of the activation before it. Experts have one size F, a
/// multiple of 8. y is the gradient of the pre-activation [R, 2 F]; maps of pre, y and act have
/// boxes of kGroupedStoreRows by 64.
struct ActivationGradParams : GroupedRowsParams {
  CUtensorMap pre_map;
  CUtensorMap act_map;
  void* act;             ///< [R, F]: the activation itself, null where nobody reads it
  const float* probs;    ///< [R], or null: 1
  float* prob_partials;  ///< [ceil(F / kProbPartialFeatures), R], null without probs
  int64_t num_rows;      ///< R
};
void launch_activation_grad(const ActivationGradParams& params, cudaStream_t stream);

/// grad_probs [R] = the sums of prob_partials [num_partials, R], in their order, of the rows below
/// *num_rows_in_use.
struct ProbSums {
  const float* partials;
  int num_partials;
  int64_t num_rows;
  const int64_t* num_rows_in_use;
  float* grad_probs;
};
void launch_prob_sums(const ProbSums& sums, cudaStream_t stream);

}  // namespace tessera::cuda
