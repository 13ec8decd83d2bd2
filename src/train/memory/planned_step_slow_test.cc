// Plans of very many random layouts: no rank waits forever, and all of a group exchange in one
// order.
#include <gtest/gtest.h>

#include "step/check_plan.h"
#include "train/memory/planned_rank.h"
#include "train/testing/random_layout.h"

namespace tessera {
namespace {

TEST(PlannedStepSlow, TenThousandRandomLayoutsFitTogether) {
  constexpr uint64_t kLayouts = 10'000;
  for (uint64_t seed = 0; seed < kLayouts; ++seed) {
    testing::RandomLayout layout = testing::draw_layout(seed, 8);
    if (seed % 2 == 0) testing::merge_passes(layout.settings);
    std::vector<StepPlan> plans;
    for (int64_t rank = 0; rank < layout.num_ranks; ++rank) {
      plans.push_back(
          plan_step(layout.settings, plan_rank(layout.settings, rank, layout.num_ranks)));
    }
    EXPECT_NO_THROW(check_ranks(plans)) << "seed " << seed << ": " << testing::describe(layout);
  }
}

}  // namespace
}  // namespace tessera
