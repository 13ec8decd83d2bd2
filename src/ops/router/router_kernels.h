#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "core/dtype.h"
#include "ops/cuda/column_sums.h"
#include "ops/router/score_function.h"

/// The router's work on the GPU. Shape letters as in router.h; a *block* is kRouterBlockTokens
/// consecutive tokens, whose partial sums are taken together, whatever the GPU.
namespace tessera::cuda {

constexpr int kRouterMaxExperts = 1024;
constexpr int kRouterBlockTokens = 32;

__host__ __device__ constexpr int64_t router_blocks(int64_t num_tokens) {
  return (num_tokens + kRouterBlockTokens - 1) / kRouterBlockTokens;
}

/// What of RouterSpec the kernels need.
struct RouterRule {
  int num_experts;
  int top_k;
  ScoreFunction score;
  bool after_top_k;
  bool normalize;
  bool force_balanced;
  float scale;
  int num_groups;
  int top_groups;
  bool top_two_groups;  ///< a group is ranked by its two best experts
};

/// So few that launches take most of the time: the kernels of the tokens do what would otherwise be
/// launches beside them.
constexpr int64_t kRouterFewTokens = 8192;
constexpr int64_t kRouterFewExperts = 32;
constexpr bool is_router_few(int64_t num_tokens, int64_t num_experts) {
  return num_tokens > 0 && num_tokens <= kRouterFewTokens && num_experts <= kRouterFewExperts;
}

/// Thread blocks that add the statistics of all tokens' blocks up.
constexpr int kRouterTotalParts = 8;

/// Adds the blocks' statistics up: score means, counts and losses.
struct RouterTotals {
  int num_experts;
  int group_size;
  int64_t num_tokens;
  const float* share_sums;
  const int32_t* counts;
  const double* z_sums;
  double* share_parts;   ///< scratch memory [kRouterTotalParts, E]
  int32_t* count_parts;  ///< likewise
  float* score_means_E;
  float* counts_E;
  float* z_loss;
  float* balance_loss;  ///< of all tokens as one segment; null: not wanted
};
void launch_router_totals(const RouterTotals& totals, cudaStream_t stream);

/// Scores, choice and probabilities of every token, and each block's statistics.
struct RouterTokens {
  RouterRule rule;
  int64_t num_tokens;
  const float* logits_TE;
  const float* bias_E;         ///< null: none
  const int32_t* replayed_TK;  ///< null: none; a token's choice, where its first is not below 0
  float* probs_TK;
  int32_t* expert_idx_TK;
  float* share_sums;  ///< [blocks, E] sums of the scores made to sum to 1
  int32_t* counts;    ///< [blocks, E]
  double* z_sums;     ///< [blocks]
  /// Where is_router_few, the totals are added up too; not used otherwise.
  RouterTotals totals;
  unsigned* totals_counter;  ///< in the GPU's memory, zero before and after
};
void launch_route_tokens(const RouterTokens& tokens, cudaStream_t stream);

/// The f of the balance loss: counts divided by their sum, an expert having the sum of its group.
struct RouterFractions {
  int num_experts;
  int group_size;
  const float* counts_E;
  float* fractions_E;
};
void launch_router_fractions(const RouterFractions& fractions, cudaStream_t stream);

/// The same for each segment of tokens, from its own assignments.
struct SegmentFractions {
  int num_experts;
  int top_k;
  int group_size;
  int64_t num_segments;
  int64_t num_tokens;
  const int32_t* cu_seqlens;  ///< [segments + 1]
  const int32_t* expert_idx_TK;
  float* fractions_SE;
};
void launch_segment_fractions(const SegmentFractions& fractions, cudaStream_t stream);

/// Each block's sum over tokens of f · shares, f being of the token's segment.
struct SegmentBalance {
  int num_experts;
  ScoreFunction score;
  int64_t num_segments;
  int64_t num_tokens;
  const int32_t* cu_seqlens;
  const float* logits_TE;
  const float* fractions_SE;
  double* balance_sums;  ///< [blocks]
};
void launch_segment_balance(const SegmentBalance& balance, cudaStream_t stream);

/// The balance loss of segments, from the blocks' sums.
struct SegmentLoss {
  int num_groups;
  int64_t num_tokens;
  const double* balance_sums;
  float* balance_loss;
};
void launch_segment_loss(const SegmentLoss& loss, cudaStream_t stream);

/// Three terms that add up to the weight, or two of which the first comes again.
enum class RouterTerms { kThree, kTwoAndFirst };
/// The weight and where its BF16 terms go: the first ones of all `count` values, the second ones,
/// and the third or first ones.
struct RouterWeight {
  const float* values_EH;
  int64_t count;  ///< E · H; 0: no terms are wanted
  RouterTerms which;
  void* terms_3EH;
};

/// The gradient of the logits. Gradients that have not arrived are null.
struct RouterBackwardTokens {
  RouterRule rule;
  int group_size;
  int64_t num_tokens;
  int64_t num_segments;
  const int32_t* cu_seqlens;  ///< null: one segment
  const float* logits_TE;
  const int32_t* expert_idx_TK;
  const float* fractions_SE;
  const float* grad_probs_TK;
  const float* grad_balance;
  const float* grad_z;
  const float* grad_means_E;
  const float* given_grad_logits_TE;
  float* grad_logits_TE;  ///< null: not wanted
  /// BF16 terms of the gradient, of each token the first ones twice, then the second and the third
  /// ones; null: not wanted.
  void* grad_terms_T4E;
  /// Of one segment, where is_router_few: the fractions are made from these as
  /// launch_router_fractions does, and fractions_SE is not read; null otherwise.
  const float* counts_E;
  RouterWeight weight;  ///< made into terms where is_router_few; count 0 otherwise
};
void launch_router_backward_tokens(const RouterBackwardTokens& tokens, cudaStream_t stream);

/// The router's products, to the precision of F32 whatever x is: x is BF16 or F32 [T, H], weight
/// F32 [E, H].
struct RouterShape {
  int64_t num_tokens;
  int64_t hidden_size;
  int64_t num_experts;
  DType dtype;  ///< x and its gradient
};

/// Whether logits are made from BF16 terms of the weight by launch_router_tensor_logits, rather
/// than by launch_router_logits.
bool has_tensor_logits(const RouterShape& shape);
/// Whether gradients are made from BF16 terms of the F32 operands by products of BF16 matrices,
/// rather than by launch_router_product_grads.
bool can_split_router(const RouterShape& shape);

void launch_split_weight(const RouterWeight& weight, cudaStream_t stream);

/// Tokens of a thread block of launch_router_tensor_logits.
constexpr int kRouterTileTokens = 128;
/// Experts that it takes at once: few where tokens alone would not keep the GPU busy. The bits do
/// not depend on it.
constexpr int router_tile_experts(int64_t num_tokens, int num_experts, int num_sms) {
  const int64_t token_tiles = (num_tokens + 2 * kRouterTileTokens - 1) / (2 * kRouterTileTokens);
  int most = 128;
  while (most > 32 && 2 * token_tiles * ((num_experts + most - 1) / most) <= num_sms / 2) most /= 2;
  const int tiles = (num_experts + most - 1) / most;
  return ((num_experts + tiles - 1) / tiles + 31) / 32 * 32;
}

/// How many copies of the weight's terms launch_router_tensor_logits makes, one for each cluster of
/// its blocks, which saves a launch before it; 0: the terms are given.
constexpr int64_t router_term_copies(const RouterShape& s) {
  const bool is_few = is_router_few(s.num_tokens, s.num_experts) &&
                      s.num_experts * s.hidden_size <= 16384;  // some values a thread
  return is_few ? (s.num_tokens + 2 * kRouterTileTokens - 1) / (2 * kRouterTileTokens) : 0;
}

/// logits_TE = x · weightᵀ, of BF16 x and the weight's three terms.
struct RouterTensorLogits {
  CUtensorMap x;      ///< by boxes of kRouterTileTokens rows
  CUtensorMap terms;  ///< of [copies (or 1), 3E, H], by boxes of router_tile_experts / 2 rows
  RouterWeight own;   ///< what copies of the terms are made from; count 0: they are given
  float* logits_TE;
  int64_t num_tokens;
  int num_experts;
  int hidden_size;
  int num_sms;
};
void launch_router_tensor_logits(const RouterTensorLogits& logits, cudaStream_t stream);

/// Into how many runs of tokens the weight's gradient is cut; their sums are added in order.
int router_weight_splits(const RouterShape& shape);
/// Adds to grad_weight the sum of num_splits partial ones.
void launch_add_splits(const RouterShape& shape, const float* partials, int num_splits,
                       Accumulator grad_weight_EH, cudaStream_t stream);

/// logits_TE = x · weightᵀ.
struct RouterLogits {
  RouterShape shape;
  const void* x;
  const float* weight;
  float* logits_TE;
};
void launch_router_logits(const RouterLogits& logits, cudaStream_t stream);

/// As many tokens as one block of them has, where launches take most of the time: one kernel makes
/// the logits, the choices and the totals.
constexpr int kRouterOneBlockExperts = 256;
bool is_router_one_block(const RouterShape& shape);
/// REQUIRES is_router_one_block, and logits without a bias of their own.
void launch_route_one_block(const RouterTokens& tokens, const RouterLogits& logits,
                            cudaStream_t stream);

/// grad_x = grad_logits · weight + addend (null: zero), and grad_logitsᵀ · x added to
/// grad_weight_EH, which has no sums where it is not wanted.
struct RouterProductGrads {
  RouterShape shape;
  const float* grad_logits_TE;
  const void* x;
  const float* weight;
  float* partials;  ///< [splits, E, H]
  const void* addend;
  void* grad_x;
  Accumulator grad_weight_EH;
};
void launch_router_product_grads(const RouterProductGrads& grads, cudaStream_t stream);

}  // namespace tessera::cuda
