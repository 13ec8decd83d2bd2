#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <utility>

#include "train/tune/answers_testing.h"
#include "train/tune/policy.h"
#include "train/tune/tune_run_testing.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class PreferenceRun : public testing::TuneRunTest {};

TEST_F(PreferenceRun, PreferencesAreLearned) {
  Settings own = dpo_settings("learns");
  own.train.steps = own.schedule.num_steps = 12;
  const auto records = run(own);
  EXPECT_NEAR(records.front().loss, std::log(2.0), 1e-6);
  EXPECT_LT(records.back().loss, 0.3);
  EXPECT_EQ(number(records.back(), "accuracy"), 1);
  EXPECT_GT(number(records.back(), "margin"), 1);
}

TEST_F(PreferenceRun, HoldsOutNothingToEvaluate) {
  Settings own = dpo_settings("held-out");
  own.train.steps = own.schedule.num_steps = 1;
  run(own);
  LoadedModel model(own.run.folder, DeviceChoice::kCpu);
  EXPECT_THAT([&] { evaluate(model, {}); },
              ThrowsMessage<UserError>(HasSubstr("the run held no data out for validation")));
}

/// In whatever precision the run holds the weights that it begins with, at its start it is the
/// model that it is compared with.
TEST_F(PreferenceRun, ReferencesAreOfTheRunsPrecision) {
  const auto of = [](Settings own, Precision precision) {
    own.train.precision = precision;
    own.train.steps = own.schedule.num_steps = 1;
    return own;
  };
  for (const auto& [from, to] :
       {std::pair(Precision::kF32, Precision::kBF16), std::pair(Precision::kBF16, Precision::kF32),
        std::pair(Precision::kBF16, Precision::kFp16)}) {
    const auto name = fmt::format("{}-{}", precision_name(from), precision_name(to));
    const Settings base = of(rl_settings("base-" + name), from);
    run(base);
    Settings own = of(dpo_settings("dpo-" + name), to);
    own.run.init_from = base.run.folder;
    const auto records = run(own);
    EXPECT_EQ(number(records.front(), "margin"), 0) << name;
    EXPECT_NEAR(records.front().loss, std::log(2.0), 1e-6) << name;
  }
}

/// A run that continues with other pairs, or is compared with another model, says so.
TEST_F(PreferenceRun, WhatIsLearnedFromIsCompared) {
  const auto train_to = [&](Settings own, int64_t steps) {
    own.train.steps = own.schedule.num_steps = steps;
    out_.str("");
    run(own);
    return out_.str();
  };
  const Settings base = rl_settings("base");
  train_to(base, 1);
  Settings own = dpo_settings("dpo");
  own.run.init_from = base.run.folder;
  const auto changed = [](const char* what) { return HasSubstr(what); };
  constexpr const char* kReference = "are no longer those that the run began with";
  constexpr const char* kPairs = "pairs.jsonl has changed since the run began";
  const auto is_silent = AllOf(Not(changed(kReference)), Not(changed(kPairs)));
  EXPECT_THAT(train_to(own, 1), is_silent);
  EXPECT_THAT(train_to(own, 2), is_silent);
  train_to(base, 2);
  EXPECT_THAT(train_to(own, 3), AllOf(changed(kReference), Not(changed(kPairs))));
  std::ofstream(own.dpo.pairs, std::ios::app)
      << "{\"prompt\": \"four\", \"chosen\": \"yes\", \"rejected\": \"no\"}\n";
  EXPECT_THAT(train_to(own, 4), AllOf(Not(changed(kReference)), changed(kPairs)));
}

/// The step's gradient is that of equation 7 over the forward pass's log-probabilities: along it,
/// the loss changes by its norm.
TEST_F(PreferenceRun, PreferenceGradientsAgreeWithFiniteDifferences) {
  Settings own = dpo_settings("slopes");
  own.schedule.peak_lr = 1e-30;
  own.train.max_grad_norm = 0;
  own.optimizer.weight_decay = 0;
  const auto trainer = open(own);
  std::vector<Answer> answers;
  for (int32_t i = 0; i < 4; ++i)
    answers.push_back({.tokens = {1, 2 + i, 3 * i, 7, 40 + 9 * i, 256}, .first = 2 + i % 2});
  AnswerBatches batches(own, trainer->fewest_batches(), 0, answers);
  AnswerScorer scorer = score_trainer(*trainer);
  std::vector<AnswerScores> scores(answers.size());
  const auto loss_at = [&] {
    const auto now = batches.score(scorer);
    for (size_t i = 0; i < now.size(); ++i) scores[i].now = now[i];
    return weigh_dpo(scores, 2.0);
  };
  const auto start = batches.score(scorer);
  for (size_t i = 0; i < start.size(); ++i) {
    scores[i].reference = start[i];
    for (double& score : scores[i].reference) score += 0.1 * static_cast<double>(i);
  }
  trainer->give_batches(batches.weigh(loss_at().weights));
  const double norm = trainer->step().update.grad_norm;
  WholeTensors gradients;
  gather_parts(trainer->state().optimizer().gradient_slices(), gradients);
  constexpr double kStep = 2e-2;
  const auto move = [&](double by) {
    for (const ModelParameter& parameter : trainer->state().parameters().all()) {
      const auto weights = parameter.weight.span<float>();
      const std::vector<float>& slopes = gradients.at(parameter.spec.name).values;
      for (size_t i = 0; i < weights.size(); ++i)
        weights[i] += static_cast<float>(by * slopes[i] / norm);
    }
  };
  move(kStep);
  const double above = loss_at().loss;
  move(-2 * kStep);
  const double below = loss_at().loss;
  EXPECT_GT(norm, 0.01);
  EXPECT_NEAR((above - below) / (2 * kStep) / norm, 1, 1e-2);
}

}  // namespace
}  // namespace tessera
