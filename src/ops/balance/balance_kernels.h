#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/router/score_function.h"

/// The balance loss over ranks on the GPU. Shape letters as in balance.h.
namespace tessera::cuda {

constexpr int kBalanceMaxExperts = 1024;

/// Tokens are added up in this many runs, so that few segments occupy the GPU too.
int balance_runs(int64_t num_tokens, int64_t num_segments);

struct BalanceSums {
  int num_experts;
  int top_k;
  ScoreFunction score;
  int64_t num_tokens;
  int64_t num_segments;
  int num_runs;
  const float* logits_TE;
  const int32_t* expert_idx_TK;
  const int32_t* segments_T;
  double* partial_sums;  ///< [runs, G, E]
  int32_t* partial_counts;
  float* counts_GE;
  float* score_sums_GE;
};
void launch_balance_sums(const BalanceSums& sums, cudaStream_t stream);

struct BalanceSumsBackward {
  int num_experts;
  ScoreFunction score;
  int64_t num_tokens;
  const float* grad_sums_GE;
  const float* logits_TE;
  const int32_t* segments_T;
  float* grad_logits_TE;
};
void launch_balance_sums_backward(const BalanceSumsBackward& backward, cudaStream_t stream);

/// The fractions of each segment; with `grad`, multiplied by it and by `scale`.
struct BalanceFractions {
  int num_experts;
  int group_size;
  int64_t num_segments;
  const float* counts_GE;
  const float* prior_counts_E;  ///< null: none
  const float* grad;            ///< null: the fractions themselves
  double scale;
  float* fractions_GE;
};
void launch_balance_fractions(const BalanceFractions& fractions, cudaStream_t stream);

/// before = earlier + the counts of the ranks below; after = earlier + those of all. `after` may be
/// `earlier`.
struct RunningSums {
  int num_experts;
  int num_ranks;
  int rank;
  const float* counts_RE;
  const float* earlier_E;
  float* before_E;
  float* after_E;
};
void launch_running_counts(const RunningSums& sums, cudaStream_t stream);

/// loss = scale · Σ fractions · score_sums.
struct BalanceDot {
  int64_t count;
  double scale;
  const float* fractions_GE;
  const float* score_sums_GE;
  float* loss;
};
void launch_balance_dot(const BalanceDot& dot, cudaStream_t stream);

}  // namespace tessera::cuda
