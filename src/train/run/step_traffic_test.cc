#include "train/run/step_traffic.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/thread/thread_world.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

const CommStatistics::Key kGather = {"tp", CommKind::kAllGather};
const CommStatistics::Key kSend = {"pp", CommKind::kSend};
const CommStatistics::Key kBarrier = {"world", CommKind::kBarrier};

TEST(StepTraffic, CountsWhatStepsAdd) {
  StepTraffic traffic;
  traffic.add_step({}, {{kGather, {2, 100}}, {kBarrier, {1, 0}}});
  // What comes between two steps counts for neither.
  traffic.add_step({{kGather, {9, 900}}}, {{kGather, {11, 1040}}, {kSend, {1, 8}}});
  EXPECT_EQ(traffic.num_steps(), 2);
  ASSERT_EQ(traffic.totals().size(), 2);
  EXPECT_EQ(traffic.totals().at(kGather).calls, 4);
  EXPECT_EQ(traffic.totals().at(kGather).bytes, 240);
  EXPECT_EQ(traffic.totals().at(kSend).bytes, 8);
}

TEST(StepTraffic, AddsUpTheRanksAndSaysTheMean) {
  StepTraffic::Counts totals;
  run_thread_world(3, [&](World& world) {
    StepTraffic traffic;
    // The last rank is in another stage, with other groups.
    const auto& key = world.rank() == 2 ? kSend : kGather;
    for (int step = 0; step < 2; ++step) traffic.add_step({}, {{key, {4, 1024}}});
    const CommunicatorPtr all = world.make_world_group();
    const auto sum = sum_over_ranks(traffic, *all);
    if (world.rank() == 0) {
      totals = sum;
    } else {
      EXPECT_TRUE(sum.empty());
    }
  });
  EXPECT_EQ(totals.at(kGather).bytes, 4096);
  EXPECT_EQ(totals.at(kSend).bytes, 2048);
  const std::string text = describe_traffic(totals, 2);
  EXPECT_THAT(text, HasSubstr("a step sends 3 KiB between the ranks, all together (mean of 2):\n"));
  EXPECT_THAT(text, HasSubstr("\n  tp                         all_gather            2 KiB in 8 "
                              "calls"));
  EXPECT_THAT(text, HasSubstr("\n  pp                         send                  1 KiB in 4 "
                              "calls"));
  EXPECT_THAT(text, Not(HasSubstr("barrier")));
}

}  // namespace
}  // namespace tessera
