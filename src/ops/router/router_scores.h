#pragma once

#include <cstdint>

#include "ops/cpu_dispatch.h"
#include "ops/router/router.h"

namespace tessera {
inline namespace TESSERA_CPU_LEVEL {

/// What keeps a sum of chosen scores from dividing by zero, as in DeepSeek-V3.
inline constexpr float kScoreSumEpsilon = 1e-20F;

/// Softmax of n logits; returns their log-sum-exp. `to` may be `logits`.
float softmax(const float* logits, int64_t n, float* to);
/// The scores of n logits, of each by itself: not a softmax's.
void separate_scores(ScoreFunction score, const float* logits, int64_t n, float* to);

/// Divides scores that are of one logit each by their sum, which it returns.
float scores_to_shares(float* scores, int64_t n);

/// The scores of one token over all experts, made to sum to 1, as the balance loss takes them.
/// Returns the scores' sum before that (1 for softmax).
float balance_shares(ScoreFunction score, const float* logits, int64_t n, float* to);

/// The probabilities of the chosen experts of one token, from its scores over all experts (or its
/// logits, when the softmax comes after top-k).
void choose_probs(const RouterSpec& spec, const float* scores, const int32_t* expert_idx,
                  float* probs);

/// Writes the top_k experts of one token, best first. `keys` are what is compared; NaN in them is
/// replaced. `group_keys` [num_groups] and `groups` [num_groups] are scratch.
void select_experts(const RouterSpec& spec, float* keys, float* group_keys, int32_t* groups,
                    int32_t* expert_idx);

}  // namespace TESSERA_CPU_LEVEL
}  // namespace tessera
