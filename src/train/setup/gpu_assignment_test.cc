#include "train/setup/gpu_assignment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/thread/thread_world.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

RankGpus rank_on(const std::string& machine, std::vector<uint64_t> gpus) {
  RankGpus rank{
      .machine = machine, .can_communicate = true, .gpus = std::move(gpus), .indices = {}};
  for (size_t i = 0; i < rank.gpus.size(); ++i) rank.indices.push_back(static_cast<int>(i));
  return rank;
}

TEST(AssignGpus, InTurnWhereAllAreSeen) {
  const std::vector<RankGpus> ranks(3, rank_on("a", {11, 12, 13, 14}));
  EXPECT_THAT(assign_gpus(ranks).indices, ElementsAre(0, 1, 2));
}

TEST(AssignGpus, TheOneThatIsSeen) {
  const std::vector<RankGpus> ranks = {rank_on("a", {12}), rank_on("a", {11})};
  EXPECT_THAT(assign_gpus(ranks).indices, ElementsAre(0, 0));
}

TEST(AssignGpus, OnSeveralMachines) {
  const std::vector<RankGpus> ranks = {rank_on("a", {1, 2}), rank_on("b", {3, 4}),
                                       rank_on("a", {1, 2}), rank_on("b", {3, 4})};
  EXPECT_THAT(assign_gpus(ranks).indices, ElementsAre(0, 0, 1, 1));
}

/// Some of the machine's GPUs may be of other kinds.
TEST(AssignGpus, AsPlacesInTheRanksList) {
  RankGpus rank = rank_on("a", {7, 8});
  rank.indices = {1, 3};
  EXPECT_THAT(assign_gpus(std::vector{rank, rank}).indices, ElementsAre(1, 3));
}

TEST(AssignGpus, RefusesMoreRanksThanGpus) {
  const std::vector<RankGpus> ranks(3, rank_on("a", {11, 12}));
  const GpuAssignment assignment = assign_gpus(ranks);
  EXPECT_THAT(assignment.indices, IsEmpty());
  EXPECT_THAT(assignment.why, HasSubstr("3 of the 3 ranks are on a, where rank 2 sees 2 GPUs"));
}

TEST(AssignGpus, NamesWhoSeesNone) {
  const std::vector<RankGpus> ranks = {rank_on("a", {11}), rank_on("b", {})};
  EXPECT_THAT(assign_gpus(ranks).why, HasSubstr("rank 1 on b sees no GPU"));
}

TEST(AssignGpus, NeedsSomethingBetweenThem) {
  std::vector<RankGpus> ranks(2, rank_on("a", {11, 12}));
  ranks[1].can_communicate = false;
  EXPECT_THAT(assign_gpus(ranks).why, HasSubstr("rank 1 on a has no NCCL"));
  EXPECT_THAT(assign_gpus(std::span(ranks).last(1)).indices, ElementsAre(0));
}

TEST(ExchangeGpus, AllRanksLearnAll) {
  run_thread_world(3, [](World& world) {
    RankGpus own = rank_on(fmt::format("machine {}", world.rank()), {});
    for (int64_t i = 0; i < world.rank(); ++i) own.gpus.push_back(100 + static_cast<uint64_t>(i));
    own.indices.assign(own.gpus.size(), 5);
    const std::vector<RankGpus> all = exchange_gpus(own, world);
    ASSERT_EQ(all.size(), 3U);
    EXPECT_EQ(all[1].machine, "machine 1");
    EXPECT_THAT(all[2].gpus, ElementsAre(100, 101));
    EXPECT_THAT(all[2].indices, ElementsAre(5, 5));
    EXPECT_TRUE(all[0].can_communicate);
    EXPECT_THAT(all[0].gpus, IsEmpty());
  });
}

}  // namespace
}  // namespace tessera
