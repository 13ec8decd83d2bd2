#include "train/plan/what_if.h"

#include <gtest/gtest.h>

#include "train/plan/plan_testing.h"
#include "train/plan/simulated_step.h"

namespace tessera {
namespace {

using testing::settings_to_plan;
using testing::small_machine;

TEST(WhatIf, FasterDevicesAndLinksTakeLess) {
  const Settings settings = settings_to_plan({"--parallel.ep=4"});
  const StepSpeeds speeds = simulate_what_if(settings, 4, small_machine(), {});
  ASSERT_EQ(speeds.seconds.size(), speeds.computing.size());
  ASSERT_EQ(speeds.exposed.size(), speeds.computing.size());
  for (size_t i = 0; i < speeds.seconds.size(); ++i) {
    ASSERT_EQ(speeds.seconds[i].size(), speeds.links.size());
    ASSERT_EQ(speeds.exposed[i].size(), speeds.links.size());
    for (size_t j = 0; j < speeds.seconds[i].size(); ++j) {
      const double seconds = speeds.seconds[i][j];
      EXPECT_GT(seconds, speeds.exposed[i][j]);
      if (i > 0) {
        EXPECT_LT(seconds, speeds.seconds[i - 1][j]);
      }
      if (j > 0) {
        EXPECT_LE(seconds, speeds.seconds[i][j - 1]);
      }
    }
  }
  EXPECT_LT(speeds.seconds[0].back(), speeds.seconds[0].front());
}

TEST(WhatIf, TheHardwaresOwnSpeedsGiveItsStep) {
  const Settings settings = settings_to_plan({"--parallel.pp=2", "--parallel.ep=2"});
  const StepSpeeds speeds = simulate_what_if(settings, 4, small_machine(), {});
  const SimulatedStep step = simulate_step(settings, 4, StepWork(small_machine()), 0);
  ASSERT_EQ(speeds.computing[1], 1);
  ASSERT_EQ(speeds.links[2], 1);
  EXPECT_DOUBLE_EQ(speeds.seconds[1][2], step.seconds);
  EXPECT_DOUBLE_EQ(speeds.exposed[1][2], step.slowest().shares.exposed);
}

}  // namespace
}  // namespace tessera
