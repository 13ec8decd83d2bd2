#include "optim/schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "core/error.h"

namespace tessera {
namespace {

std::vector<double> rates(const ScheduleSpec& spec, int64_t num_steps) {
  validate(spec);
  std::vector<double> result;
  for (int64_t step = 0; step < num_steps; ++step) result.push_back(learning_rate(spec, step));
  return result;
}

void expect_rates(const ScheduleSpec& spec, const std::vector<double>& expected) {
  EXPECT_THAT(rates(spec, static_cast<int64_t>(expected.size())),
              ::testing::Pointwise(::testing::DoubleNear(1e-12), expected));
}

// Rates of a PyTorch LambdaLR: warm-up over 3 of 12 steps to 3e-3, then a cosine to a tenth.
TEST(Schedule, CosineMatchesPyTorch) {
  expect_rates({.peak_lr = 3e-3, .num_steps = 12, .warmup_steps = 3, .min_lr_ratio = 0.1},
               {0.001, 0.002, 0.003, 0.003, 0.0029185850380609763, 0.0026841599982106203, 0.002325,
                0.0018844250398503564, 0.001415574960149644, 0.000975, 0.0006158400017893799,
                0.00038141496193902383, 0.0003, 0.0003});
}

TEST(Schedule, Constant) {
  expect_rates({.kind = ScheduleKind::kConstant, .peak_lr = 2.0, .num_steps = 4, .warmup_steps = 2},
               {1, 2, 2, 2, 2});
}

TEST(Schedule, Linear) {
  expect_rates({.kind = ScheduleKind::kLinear,
                .peak_lr = 1.0,
                .num_steps = 5,
                .warmup_steps = 1,
                .min_lr_ratio = 0.0},
               {1, 1, 0.75, 0.5, 0.25, 0, 0});
}

TEST(Schedule, WarmupStableDecay) {
  ScheduleSpec spec = {.kind = ScheduleKind::kWsd,
                       .peak_lr = 1.0,
                       .num_steps = 10,
                       .warmup_steps = 2,
                       .min_lr_ratio = 0.0,
                       .decay_fraction = 0.4};
  expect_rates(spec, {0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0});
  spec.decay_shape = DecayShape::kOneMinusSqrt;
  expect_rates(spec, {0.5, 1, 1, 1, 1, 1, 1, 0.5, 1 - std::sqrt(0.5), 1 - std::sqrt(0.75), 0});
  spec.min_lr_ratio = 0.5;
  EXPECT_DOUBLE_EQ(learning_rate(spec, 7), 0.75);
}

TEST(Schedule, WithoutWarmupTheFirstStepHasThePeak) {
  for (const ScheduleKind kind : {ScheduleKind::kConstant, ScheduleKind::kCosine,
                                  ScheduleKind::kLinear, ScheduleKind::kWsd}) {
    EXPECT_DOUBLE_EQ(learning_rate({.kind = kind, .peak_lr = 0.5, .num_steps = 10}, 0), 0.5);
  }
}

TEST(Schedule, WarmupMayTakeEveryStep) {
  expect_rates({.peak_lr = 1.0, .num_steps = 2, .warmup_steps = 2, .min_lr_ratio = 0.1}, {0.5, 1});
}

TEST(Schedule, NeverRisesAfterItsWarmup) {
  for (const ScheduleKind kind :
       {ScheduleKind::kCosine, ScheduleKind::kLinear, ScheduleKind::kWsd}) {
    for (const DecayShape shape : {DecayShape::kLinear, DecayShape::kOneMinusSqrt}) {
      const ScheduleSpec spec = {
          .kind = kind, .peak_lr = 1.0, .num_steps = 97, .warmup_steps = 13, .decay_shape = shape};
      const std::vector<double> all = rates(spec, 120);
      for (size_t i = 14; i < all.size(); ++i) EXPECT_LE(all[i], all[i - 1]) << "step " << i;
      EXPECT_DOUBLE_EQ(all[97], 0.1);
    }
  }
}

void expect_refused(const ScheduleSpec& spec, const std::string& message) {
  try {
    validate(spec);
    ADD_FAILURE() << "taken, though: " << message;
  } catch (const UserError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr(message));
  }
}

TEST(Schedule, RefusesWhatDoesNotFit) {
  expect_refused({.num_steps = 0}, "number of steps must be at least 1, got 0");
  expect_refused({.num_steps = 5, .warmup_steps = 6},
                 "warmup_steps must be from 0 to the number of steps, 5, got 6");
  expect_refused({.num_steps = 5, .warmup_steps = -1}, "got -1");
  expect_refused({.peak_lr = -1e-3, .num_steps = 5}, "learning rate");
  expect_refused({.peak_lr = std::nan(""), .num_steps = 5}, "learning rate");
  expect_refused({.num_steps = 5, .min_lr_ratio = 1.5},
                 "min_lr_ratio must be from 0 to 1, got 1.5");
  expect_refused({.kind = ScheduleKind::kWsd, .num_steps = 5, .decay_fraction = 0.0},
                 "decay_fraction");
  expect_refused(
      {.kind = ScheduleKind::kWsd, .num_steps = 10, .warmup_steps = 6, .decay_fraction = 0.5},
      "6 warm-up steps and 5 decay steps (0.5 of 10) do not fit into 10 steps");
}

}  // namespace
}  // namespace tessera
