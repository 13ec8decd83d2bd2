#include "train/tune/policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <numeric>

#include "core/random.h"

namespace tessera {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;

std::vector<double> random_scores(Random& random, size_t count, double deviation = 0.4) {
  std::vector<double> scores;
  for (size_t i = 0; i < count; ++i) scores.push_back(-2 + deviation * random.next_normal());
  return scores;
}

/// Answers of ragged lengths, whose models differ.
std::vector<AnswerScores> random_answers(size_t count, bool with_reference) {
  Random random(5, count);
  std::vector<AnswerScores> answers;
  for (size_t i = 0; i < count; ++i) {
    const size_t length = 1 + random.next_below(6);
    answers.push_back(
        {.now = random_scores(random, length),
         .written = random_scores(random, length),
         .reference = with_reference ? random_scores(random, length) : std::vector<double>()});
  }
  return answers;
}

/// That weights are the slopes of a loss: of -Σ weight · log p / number of tokens.
void expect_slopes(std::vector<AnswerScores> answers, const TokenWeights& found,
                   const std::function<double(std::span<const AnswerScores>)>& loss) {
  constexpr double kStep = 1e-5;
  double num_tokens = 0;
  for (const AnswerScores& answer : answers) num_tokens += static_cast<double>(answer.now.size());
  ASSERT_EQ(found.weights.size(), answers.size());
  for (size_t i = 0; i < answers.size(); ++i) {
    ASSERT_EQ(found.weights[i].size(), answers[i].now.size());
    for (size_t t = 0; t < answers[i].now.size(); ++t) {
      double& score = answers[i].now[t];
      const double at = score;
      score = at + kStep;
      const double above = loss(answers);
      score = at - kStep;
      const double below = loss(answers);
      score = at;
      EXPECT_NEAR(-found.weights[i][t] / num_tokens, (above - below) / (2 * kStep), 1e-6)
          << "answer " << i << ", token " << t;
    }
  }
}

/// Equation 7 of Rafailov et al., written down plainly.
double dpo_loss(std::span<const AnswerScores> answers, double beta) {
  const auto ratio = [](const AnswerScores& a) {
    return std::accumulate(a.now.begin(), a.now.end(), 0.0) -
           std::accumulate(a.reference.begin(), a.reference.end(), 0.0);
  };
  double loss = 0;
  for (size_t i = 0; i < answers.size(); i += 2)
    loss -=
        std::log(1 / (1 + std::exp(-(beta * ratio(answers[i]) - beta * ratio(answers[i + 1])))));
  return loss / (static_cast<double>(answers.size()) / 2);
}

/// GRPO's objective, written down plainly.
double grpo_loss(std::span<const AnswerScores> answers, const std::vector<double>& advantages,
                 const RlSettings& rl) {
  double sum = 0;
  double num_tokens = 0;
  for (size_t i = 0; i < answers.size(); ++i) {
    double of_answer = 0;
    for (size_t t = 0; t < answers[i].now.size(); ++t) {
      const double ratio = std::exp(answers[i].now[t] - answers[i].written[t]);
      const double clipped = std::min(std::max(ratio, 1 - rl.clip_low), 1 + rl.clip_high);
      double value = std::min(ratio * advantages[i], clipped * advantages[i]);
      if (!answers[i].reference.empty()) {
        const double away = answers[i].reference[t] - answers[i].now[t];
        value -= rl.kl_coefficient * (std::exp(away) - away - 1);
      }
      of_answer += value;
    }
    const auto length = static_cast<double>(answers[i].now.size());
    sum += rl.average == LossAverage::kTokens ? of_answer : of_answer / length;
    num_tokens += rl.average == LossAverage::kTokens ? length : 1;
  }
  return -sum / num_tokens;
}

TEST(Policy, DpoWeightsAreTheSlopesOfItsLoss) {
  for (const double beta : {0.1, 2.0}) {
    const auto answers = random_answers(8, true);
    const DpoWeights dpo = weigh_dpo(answers, beta);
    EXPECT_NEAR(dpo.loss, dpo_loss(answers, beta), 1e-12);
    expect_slopes(answers, dpo, [&](auto all) { return dpo_loss(all, beta); });
  }
}

TEST(Policy, DpoOfEqualModelsIsUndecided) {
  auto answers = random_answers(4, true);
  for (AnswerScores& answer : answers) answer.reference = answer.now;
  const DpoWeights dpo = weigh_dpo(answers, 0.1);
  EXPECT_NEAR(dpo.loss, std::log(2.0), 1e-12);
  EXPECT_EQ(dpo.margin, 0);
  EXPECT_EQ(dpo.accuracy, 0);
}

TEST(Policy, DpoOfHugeMarginsIsFinite) {
  std::vector<AnswerScores> answers(4);
  for (size_t i = 0; i < 4; ++i)
    answers[i] = {.now = {i == 0 || i == 3 ? 0.0 : -1e5}, .written = {}, .reference = {0.0}};
  const DpoWeights dpo = weigh_dpo(answers, 1.0);  // one pair is right, one wrong
  EXPECT_NEAR(dpo.loss, 0.5e5, 1e-6);
  EXPECT_EQ(dpo.accuracy, 0.5);
  EXPECT_EQ(dpo.weights[0][0], 0.0F);
  EXPECT_NEAR(dpo.weights[2][0], 2.0F, 1e-6);
}

TEST(Policy, GrpoWeightsAreTheSlopesOfItsObjective) {
  const std::vector<double> advantages = {1.2, -0.7, 0.0, 0.4, -1.5, 2.0};
  for (const LossAverage average : {LossAverage::kTokens, LossAverage::kSequences}) {
    for (const double kl : {0.0, 0.3}) {
      RlSettings rl;
      rl.average = average;
      rl.kl_coefficient = kl;
      rl.clip_high = 0.28;
      const auto answers = random_answers(6, kl > 0);
      const GrpoWeights grpo = weigh_grpo(answers, advantages, rl);
      EXPECT_NEAR(grpo.loss, grpo_loss(answers, advantages, rl), 1e-12);
      expect_slopes(answers, grpo, [&](auto all) { return grpo_loss(all, advantages, rl); });
      EXPECT_GT(grpo.statistics.clip_fraction, 0);
      EXPECT_LT(grpo.statistics.clip_fraction, 1);
    }
  }
}

TEST(Policy, GrpoOnItsOwnAnswersWeighsByAdvantage) {
  auto answers = random_answers(2, false);
  for (AnswerScores& answer : answers) answer.written = answer.now;
  const GrpoWeights grpo = weigh_grpo(answers, std::vector<double>{0.5, -2}, {});
  EXPECT_THAT(grpo.weights[0], ::testing::Each(0.5F));
  EXPECT_THAT(grpo.weights[1], ::testing::Each(-2.0F));
  EXPECT_EQ(grpo.statistics.clip_fraction, 0);
  EXPECT_EQ(grpo.statistics.generator_error, 0);
}

TEST(Policy, AdvantagesAreRelativeToTheGroup) {
  const std::vector<double> rewards = {1, 0, 0, 1, 3, 3, 3, 3};
  EXPECT_THAT(find_advantages(rewards, 4, AdvantageKind::kDrGrpo),
              ElementsAre(0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0));
  const auto near = [](double x) { return DoubleNear(x, 1e-5); };
  EXPECT_THAT(find_advantages(rewards, 4, AdvantageKind::kGrpo),
              ElementsAre(near(1), near(-1), near(-1), near(1), 0, 0, 0, 0));
}

}  // namespace
}  // namespace tessera
