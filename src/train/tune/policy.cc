#include "train/tune/policy.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/error.h"

namespace tessera {
namespace {

constexpr double kLeastDeviation = 1e-6;

double sum_of(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}

int64_t count_tokens(std::span<const AnswerScores> answers) {
  int64_t count = 0;
  for (const AnswerScores& answer : answers) count += std::ssize(answer.now);
  return count;
}

/// One token of GRPO's objective, and its derivative by log p.
struct TokenObjective {
  double value = 0;
  double slope = 0;
  double k3 = 0;
  bool is_clipped = false;
};

TokenObjective surrogate(double ratio, double advantage, const RlSettings& rl) {
  const double bounded = std::clamp(ratio, 1 - rl.clip_low, 1 + rl.clip_high);
  if (bounded * advantage < ratio * advantage)
    return {.value = bounded * advantage, .is_clipped = true};
  return {.value = ratio * advantage, .slope = ratio * advantage};
}

TokenObjective token_objective(const AnswerScores& answer, size_t i, double advantage,
                               const RlSettings& rl) {
  TokenObjective token = surrogate(std::exp(answer.now[i] - answer.written[i]), advantage, rl);
  if (answer.reference.empty()) return token;
  const double away = answer.reference[i] - answer.now[i];
  token.k3 = std::exp(away) - away - 1;
  token.value -= rl.kl_coefficient * token.k3;
  token.slope += rl.kl_coefficient * (std::exp(away) - 1);
  return token;
}

/// What a token of an answer counts, where all tokens of the step counted 1: the mean is over them.
double share_of_token(LossAverage average, int64_t num_tokens, size_t num_answers,
                      size_t tokens_of_answer) {
  if (average == LossAverage::kTokens) return 1;
  return static_cast<double>(num_tokens) /
         (static_cast<double>(num_answers) * static_cast<double>(tokens_of_answer));
}

/// log(1 + exp(x)), without overflow.
double softplus(double x) {
  return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x)));
}

double margin_of(const AnswerScores& answer) {
  return sum_of(answer.now) - sum_of(answer.reference);
}

}  // namespace

std::vector<double> find_advantages(std::span<const double> rewards, int64_t group_size,
                                    AdvantageKind kind) {
  ensure(group_size > 0 && std::ssize(rewards) % group_size == 0, "{} rewards in groups of {}",
         rewards.size(), group_size);
  std::vector<double> advantages;
  for (size_t first = 0; first < rewards.size(); first += group_size) {
    const auto group = rewards.subspan(first, group_size);
    const auto size = static_cast<double>(group_size);
    const double mean = std::accumulate(group.begin(), group.end(), 0.0) / size;
    double squares = 0;
    for (const double reward : group) squares += (reward - mean) * (reward - mean);
    const double deviation = std::sqrt(squares / size);
    const double divisor = kind == AdvantageKind::kGrpo ? deviation + kLeastDeviation : 1;
    const bool is_equal = std::ranges::all_of(group, [&](double r) { return r == group[0]; });
    for (const double reward : group)
      advantages.push_back(is_equal ? 0.0 : (reward - mean) / divisor);
  }
  return advantages;
}

GrpoWeights weigh_grpo(std::span<const AnswerScores> answers, std::span<const double> advantages,
                       const RlSettings& rl) {
  GrpoWeights result;
  const int64_t num_tokens = count_tokens(answers);
  const double each = 1 / static_cast<double>(std::max<int64_t>(num_tokens, 1));
  GrpoStatistics& statistics = result.statistics;
  for (size_t idx = 0; idx < answers.size(); ++idx) {
    const AnswerScores& answer = answers[idx];
    std::vector<float>& weights = result.weights.emplace_back();
    const double share = share_of_token(rl.average, num_tokens, answers.size(), answer.now.size());
    for (size_t i = 0; i < answer.now.size(); ++i) {
      const TokenObjective token = token_objective(answer, i, advantages[idx], rl);
      weights.push_back(static_cast<float>(token.slope * share));
      const double moved = answer.written[i] - answer.now[i];
      result.loss -= token.value * share * each;
      statistics.clip_fraction += token.is_clipped ? each : 0;
      statistics.generator_kl += moved * each;
      statistics.generator_error = std::max(statistics.generator_error, std::abs(moved));
      statistics.reference_kl += token.k3 * each;
    }
  }
  return result;
}

DpoWeights weigh_dpo(std::span<const AnswerScores> answers, double beta) {
  ensure(answers.size() % 2 == 0, "{} answers are no pairs", answers.size());
  DpoWeights result;
  const double num_pairs = static_cast<double>(answers.size()) / 2;
  const auto num_tokens = static_cast<double>(count_tokens(answers));
  for (size_t first = 0; first < answers.size(); first += 2) {
    const double margin = beta * (margin_of(answers[first]) - margin_of(answers[first + 1]));
    const double sigmoid = std::exp(-softplus(margin));  // of -margin
    const double weight = beta * sigmoid * num_tokens / num_pairs;
    result.loss += softplus(-margin) / num_pairs;
    result.margin += margin / num_pairs;
    result.accuracy += margin > 0 ? 1 / num_pairs : 0;
    for (const double sign : {1.0, -1.0}) {
      const AnswerScores& answer = answers[first + (sign < 0 ? 1 : 0)];
      result.weights.emplace_back(answer.now.size(), static_cast<float>(sign * weight));
    }
  }
  return result;
}

}  // namespace tessera
