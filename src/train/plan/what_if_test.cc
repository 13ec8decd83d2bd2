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
  const WhatIf what_if = simulate_what_if(settings, 4, small_machine(), {});
  ASSERT_EQ(what_if.steps.size(), what_if.computing.size());
  for (size_t i = 0; i < what_if.steps.size(); ++i) {
    ASSERT_EQ(what_if.steps[i].size(), what_if.links.size());
    for (size_t j = 0; j < what_if.steps[i].size(); ++j) {
      const WhatIfStep& step = what_if.steps[i][j];
      EXPECT_GT(step.seconds, step.exposed);
      if (i > 0) {
        EXPECT_LT(step.seconds, what_if.steps[i - 1][j].seconds);
      }
      if (j > 0) {
        EXPECT_LE(step.seconds, what_if.steps[i][j - 1].seconds);
      }
    }
  }
  EXPECT_LT(what_if.steps[0].back().seconds, what_if.steps[0].front().seconds);
}

TEST(WhatIf, TheHardwaresOwnSpeedsGiveItsStep) {
  const Settings settings = settings_to_plan({"--parallel.pp=2", "--parallel.ep=2"});
  const WhatIf what_if = simulate_what_if(settings, 4, small_machine(), {});
  const SimulatedStep step = simulate_step(settings, 4, StepWork(small_machine()), 0);
  ASSERT_EQ(what_if.computing[1], 1);
  ASSERT_EQ(what_if.links[2], 1);
  EXPECT_DOUBLE_EQ(what_if.steps[1][2].seconds, step.seconds);
  EXPECT_DOUBLE_EQ(what_if.steps[1][2].exposed, step.slowest().shares.exposed);
}

}  // namespace
}  // namespace tessera
