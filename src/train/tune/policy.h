#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "train/setup/objective.h"

namespace tessera {

/// The arithmetic of objectives that are told by the log-probabilities of answers. Each gives the
/// gradient as a weight of every token: that of -Σ weight · log p, with weights held fixed, is the
/// objective's own where the log-probabilities are those of the weights at hand. That is exact, and
/// costs one more forward pass in each step.

/// What an answer's tokens were found to be.
struct AnswerScores {
  std::vector<double> now;        ///< log p of its tokens under the model at hand
  std::vector<double> written;    ///< when they were written; GRPO alone
  std::vector<double> reference;  ///< under the model that the run began with; empty: not asked for
};

/// What a step is told, and tells.
struct TokenWeights {
  /// By answer and token: of the loss Σ weight · (-log p) / number of the step's tokens.
  std::vector<std::vector<float>> weights;
  double loss = 0;  ///< the objective's own
};

/// Advantages of the answers to prompts, group_size to each, one group behind the other: rewards
/// relative to the group's. A group whose rewards are all equal has none. The deviation is that of
/// the group as a whole (divided by its size).
std::vector<double> find_advantages(std::span<const double> rewards, int64_t group_size,
                                    AdvantageKind kind);

/// What of the tokens a step's clip held back, and how far the model has gone.
struct GrpoStatistics {
  double clip_fraction = 0;    ///< share of the tokens without gradient for the clip's sake
  double generator_kl = 0;     ///< mean of log p written - log p now: from the writer's
  double generator_error = 0;  ///< the largest |log p written - log p now|
  double reference_kl = 0;     ///< mean k3 from the reference; 0 without
};
struct GrpoWeights : TokenWeights {
  GrpoStatistics statistics;
};

/// With ratio r = exp(now - written) and advantage A of its answer, a token's objective is min(r ·
/// A, clip(r, 1 - clip_low, 1 + clip_high) · A) - kl_coefficient · k3, k3 = exp(reference - now) -
/// (reference - now) - 1 (Shao et al., DeepSeekMath, 2024, equations 3 and 4; clip_high as in DAPO,
/// Yu et al., 2025; k3: Schulman, Approximating KL divergence, 2020).
GrpoWeights weigh_grpo(std::span<const AnswerScores> answers, std::span<const double> advantages,
                       const RlSettings& rl);

struct DpoWeights : TokenWeights {
  double margin = 0;    ///< mean of beta · ((chosen - its reference) - (rejected - its reference))
  double accuracy = 0;  ///< share of pairs with a margin above 0
};

/// Answers in pairs, the chosen one first: loss = mean of -log sigmoid(margin) (Rafailov et al.,
/// Direct Preference Optimization, 2023, equation 7).
DpoWeights weigh_dpo(std::span<const AnswerScores> answers, double beta);

}  // namespace tessera
