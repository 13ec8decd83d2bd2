#include <gtest/gtest.h>

#include "model/run/slab_bytes.h"
#include "step/check_plan.h"
#include "step/step_memory.h"
#include "train/state/planned_rank.h"
#include "train/testing/random_layout.h"

namespace tessera {
namespace {

using testing::RandomLayout;

/// The plans of all ranks of random layouts, with their optimizers, fit together.
TEST(PlannedStep, RanksOfRandomLayoutsFitTogether) {
  constexpr uint64_t kLayouts = 25;
  for (uint64_t seed = 0; seed < kLayouts; ++seed) {
    const RandomLayout layout = testing::draw_layout(seed, 8);
    SCOPED_TRACE(testing::describe(layout));
    std::vector<StepPlan> plans;
    for (int64_t rank = 0; rank < layout.num_ranks; ++rank) {
      plans.push_back(
          plan_step(layout.settings, plan_rank(layout.settings, rank, layout.num_ranks)));
    }
    EXPECT_NO_THROW(check_ranks(plans));
  }
}

/// Slabs are what a training run takes for them.
TEST(PlannedStep, CountsTheMemoryThatTrainingTakes) {
  for (uint64_t seed = 0; seed < 10; ++seed) {
    const RandomLayout layout = testing::draw_layout(seed, 4);
    SCOPED_TRACE(testing::describe(layout));
    const PlannedRank rank = plan_rank(layout.settings, 0, layout.num_ranks);
    const StepMemory memory = find_step_memory(plan_step(layout.settings, rank));
    const ActivationBytes expected = rank.model.activation_bytes();
    const SlabBytes most = bound_slab_bytes(rank.model.programs(), rank.model.placement());
    EXPECT_EQ(most.total(), expected.saved + expected.transient + expected.worst);
    const auto slabs = [&](Purpose purpose) { return memory.purposes[number_of(purpose)].slabs; };
    EXPECT_EQ(align_up(slabs(Purpose::kSaved), kSlabAlignment), most.saved);
    EXPECT_EQ(slabs(Purpose::kWorking), align_up(most.transient));
    // Gradients that nobody gives or takes have a stream all the same.
    EXPECT_LE(slabs(Purpose::kHidden), expected.hidden);
  }
}

}  // namespace
}  // namespace tessera
