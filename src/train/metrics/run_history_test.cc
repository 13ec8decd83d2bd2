#include "train/metrics/run_history.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "core/random.h"
#include "train/metrics/series.h"
#include "train/metrics/synthetic_run.h"
#include "train/metrics/test_folder.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

TEST(RunHistory, WindowsHoldEveryTokenOnceForAnyLength) {
  for (const int64_t num_steps : {1, 2, 47, 48, 49, 96, 97, 1000}) {
    const SyntheticRun run{num_steps, 2, 4};
    RunHistory history;
    double expected = 0.0;
    for (int64_t step = 1; step <= num_steps; ++step) {
      const StepRecord record = run.step(step);
      history.add(record);
      expected += static_cast<double>(record.expert_load[1].tokens_per_expert[2]);
    }
    double held = 0.0;
    int64_t next_step = 1;
    for (const LoadWindow& window : history.windows()) {
      EXPECT_EQ(window.first_step, next_step);
      EXPECT_EQ(window.num_records, window.last_step - window.first_step + 1);
      next_step = window.last_step + 1;
      held += window.layers[1].tokens[2];
    }
    EXPECT_EQ(next_step, num_steps + 1);
    EXPECT_EQ(held, expected);
    EXPECT_LE(history.windows().size(), RunHistory::kMaxWindows);
    EXPECT_EQ(history.recent_load()->last_step, num_steps);
    EXPECT_TRUE(history.steps().back().expert_load.empty());
  }
}

TEST(RunHistory, RecentLoadIsNeverAHandfulOfStepsOfALongRun) {
  const SyntheticRun run{5000, 1, 4};
  RunHistory history;
  for (int64_t step = 1; step <= 5000; ++step) {
    history.add(run.step(step));
    const LoadWindow recent = *history.recent_load();
    if (step > 200) {
      EXPECT_GE(recent.num_records * 200, step) << "step " << step;
    }
  }
}

TEST(RunHistory, RelativeLoadIsOneForAPerfectShare) {
  LoadWindow window{1, 1, 1, {{0, {2, 2, 2, 2}}, {1, {0, 0}}, {2, {0, 6, 2}}}};
  EXPECT_DOUBLE_EQ(window.relative_load(0, 3), 1.0);
  EXPECT_DOUBLE_EQ(window.relative_load(1, 0), 0.0);
  EXPECT_DOUBLE_EQ(window.relative_load(2, 1), 2.25);
}

TEST(RunHistory, RefusesLoadsOfOtherExperts) {
  RunHistory history;
  history.add(SyntheticRun{10, 2, 4}.step(1));
  EXPECT_THAT(user_error_of([&] {
                history.add(SyntheticRun{10, 2, 5}.step(2));
              }),
              HasSubstr("step 2"));
  EXPECT_THAT(user_error_of([&] {
                history.add(SyntheticRun{10, 3, 4}.step(2));
              }),
              HasSubstr("step 2"));
}

TEST(RunHistory, FindsTheBestFiniteValidation) {
  RunHistory history;
  EXPECT_FALSE(history.best_validation());
  history.add(ValidationRecord{10, 0, std::nan(""), 0.0});
  EXPECT_FALSE(history.best_validation());
  history.add(ValidationRecord{20, 0, 4.0, 0.0});
  history.add(ValidationRecord{30, 0, 4.5, 0.0});
  EXPECT_EQ(history.best_validation()->step, 20);
}

TEST(Downsample, KeepsEndsSpikesAndGaps) {
  Random random(3, 0);
  for (const size_t count : {0, 1, 7, 8, 9, 100, 1201, 100'000}) {
    Series series;
    for (size_t i = 0; i < count; ++i) {
      series.steps.push_back(static_cast<int64_t>(3 * i + 1));
      series.values.push_back(random.next_normal());
    }
    if (count > 20) {
      series.values[count / 3] = 1000.0;
      series.values[count / 2] = -1000.0;
      series.values[count / 4] = std::nan("");
    }
    const Series thin = downsample(series, 200);
    EXPECT_LE(thin.values.size(), 200U);
    if (count <= 200) {
      EXPECT_EQ(thin.steps, series.steps);
    }
    if (count <= 20) continue;
    EXPECT_EQ(thin.steps.front(), series.steps.front());
    EXPECT_EQ(thin.steps.back(), series.steps.back());
    EXPECT_TRUE(std::is_sorted(thin.steps.begin(), thin.steps.end()));
    EXPECT_THAT(thin.values, ::testing::Contains(1000.0));
    EXPECT_THAT(thin.values, ::testing::Contains(-1000.0));
    EXPECT_TRUE(std::any_of(thin.values.begin(), thin.values.end(),
                            [](double v) { return std::isnan(v); }));
    for (size_t i = 0; i < thin.values.size(); ++i) {
      const double original = series.values[thin.steps[i] / 3];
      EXPECT_TRUE(thin.values[i] == original ||
                  (std::isnan(thin.values[i]) && std::isnan(original)));
    }
  }
}

TEST(Smooth, AgreesWithAPlainMean) {
  Random random(4, 0);
  std::vector<double> values;
  for (int i = 0; i < 57; ++i) values.push_back(i % 11 == 3 ? std::nan("") : random.next_normal());
  for (const size_t reach : {0, 1, 5, 100}) {
    const std::vector<double> smoothed = smooth(values, reach);
    ASSERT_EQ(smoothed.size(), values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      if (std::isnan(values[i])) {
        EXPECT_TRUE(std::isnan(smoothed[i]));
        continue;
      }
      const size_t left = i;
      const size_t right = values.size() - 1 - i;
      const size_t before = std::min({reach, left, right + reach / 4});
      const size_t after = std::min({reach, right, left + reach / 4});
      double sum = 0.0;
      int count = 0;
      for (size_t j = i - before; j <= i + after; ++j) {
        if (std::isnan(values[j])) continue;
        sum += values[j];
        ++count;
      }
      EXPECT_NEAR(smoothed[i], sum / count, 1e-12);
    }
  }
  EXPECT_TRUE(smooth({}, 5).empty());
}

TEST(JsonNumbers, WritesNullForWhatJsonCannotHold) {
  const std::vector<double> values = {1.0, std::nan(""), 1.0 / 3.0, -1e-20};
  EXPECT_EQ(json_numbers(values), "[1,null,0.333333,-1e-20]");
  EXPECT_EQ(json_numbers({}), "[]");
  EXPECT_EQ(json_integers(std::vector<int64_t>{1, -2, 1234567890123}), "[1,-2,1234567890123]");
}

}  // namespace
}  // namespace tessera
