#include "train/run/wait_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "comm/thread/thread_world.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

RankWaits waits_of(int64_t rank, const std::string& group, const std::vector<int64_t>& ranks,
                   const std::vector<TimedExchange>& exchanges) {
  RankWaits waits{.rank = rank};
  waits.groups[group] = {ranks, exchanges};
  return waits;
}

/// Rank 1 comes 2 s after rank 0, and the exchange takes half a second.
TEST(AttributeWaits, GivesThemToTheLastToCome) {
  const WaitReport report = attribute_waits({
      waits_of(0, "ep", {0, 1}, {{.begin = 1, .end = 3.5, .waited = 2.5}}),
      waits_of(1, "ep", {0, 1}, {{.begin = 3, .end = 3.5, .waited = 0.5}}),
  });
  ASSERT_EQ(report.culprits.size(), 1);
  EXPECT_EQ(report.culprits[0].rank, 1);
  EXPECT_DOUBLE_EQ(report.culprits[0].seconds, 2);
  EXPECT_DOUBLE_EQ(report.culprits[0].by_group.at("ep"), 2);
  EXPECT_DOUBLE_EQ(report.exchanges, 1);
  EXPECT_DOUBLE_EQ(report.total(), 3);
  EXPECT_EQ(describe(report, 2, 1),
            "waits of 2 ranks in 1 step: 3.000 s, of which for rank 1 2.000 s (ep 2.000 s); for "
            "exchanges themselves 1.000 s (ep 1.000 s)");
}

/// Over the network, or not: of each group by itself.
TEST(AttributeWaits, TellsLinksApart) {
  std::vector<RankWaits> ranks;
  for (int64_t rank = 0; rank < 4; ++rank) {
    ranks.push_back(waits_of(rank, "dp", {0, 1, 2, 3}, {{.begin = 0, .end = 2, .waited = 2}}));
    const int64_t first = rank / 2 * 2;
    ranks.back().groups["tp"] = {{first, first + 1}, {{.begin = 2, .end = 3, .waited = 1}}};
    ranks.back().machine = rank < 2 ? "a" : "b";
  }
  const WaitReport report = attribute_waits(ranks);
  EXPECT_EQ(report.by_link, (std::map<std::string, double>{{"dp between machines", 8}, {"tp", 4}}));
  EXPECT_DOUBLE_EQ(report.exchanges, 12);
}

/// Four ranks of two experts each; layer 5's expert 3 has far more than others.
TEST(ExplainWaits, NamesExpertsWithMoreRows) {
  const std::vector<ExpertLoad> layers = {{2, {10, 10, 10, 10, 10, 10, 10, 10}},
                                          {5, {10, 10, 10, 90, 10, 10, 10, 10}}};
  const RankLoad load = find_load(layers, 1, 4);
  EXPECT_DOUBLE_EQ(load.share, 120.0 / 60);
  EXPECT_EQ(load.layer, 5);
  EXPECT_EQ(load.expert, 3);
  EXPECT_DOUBLE_EQ(load.of_expert, 4.5);
  EXPECT_DOUBLE_EQ(find_load({{0, {0, 0}}}, 0, 2).share, 1) << "nothing came";

  const Layout layout({.ep = 4}, 4);
  WaitReport report;
  EXPECT_EQ(explain(report, layers, layout), "") << "nobody was late";
  report.culprits.push_back({.rank = 1, .seconds = 1, .by_group = {}});
  EXPECT_EQ(explain(report, layers, layout),
            "rank 1 had 2.00 times the mean's rows for its experts; expert 3 of layer 5 alone had "
            "4.5 times a mean one's");
  report.culprits.front().rank = 0;
  EXPECT_EQ(explain(report, layers, layout), "") << "late, but not for its experts";
  EXPECT_EQ(explain(report, {}, layout), "") << "a dense model";
}

/// What is hidden behind computation is no wait, whoever was late.
TEST(AttributeWaits, CountsWaitsAlone) {
  const WaitReport report = attribute_waits({
      waits_of(0, "ep", {0, 1}, {{.begin = 1, .end = 3.5, .waited = 0.25}}),
      waits_of(1, "ep", {0, 1}, {{.begin = 3, .end = 3.5, .waited = 0.25}}),
  });
  EXPECT_TRUE(report.culprits.empty());
  EXPECT_DOUBLE_EQ(report.exchanges, 0.5);
}

/// The same name is that of several groups, each with its own order.
TEST(AttributeWaits, KeepsGroupsApart) {
  const WaitReport report = attribute_waits({
      waits_of(0, "tp", {0, 1}, {{0, 1, 1}, {1, 2, 0}}),
      waits_of(1, "tp", {0, 1}, {{1, 1, 0}, {1, 2, 0}}),
      waits_of(2, "tp", {2, 3}, {{0, 0, 0}}),
      waits_of(3, "tp", {2, 3}, {{0, 5, 5}}),
  });
  ASSERT_EQ(report.culprits.size(), 1);
  EXPECT_EQ(report.culprits[0].rank, 1);
  EXPECT_DOUBLE_EQ(report.culprits[0].seconds, 1);
  EXPECT_DOUBLE_EQ(report.exchanges, 5);
}

TEST(AttributeWaits, DoesNotGuess) {
  std::vector<RankWaits> ranks = {waits_of(0, "ep", {0, 1}, {{0, 1, 1}, {1, 2, 1}}),
                                  waits_of(1, "ep", {0, 1}, {{1, 2, 1}})};
  EXPECT_DOUBLE_EQ(attribute_waits(ranks).unassigned, 3);
  ranks = {waits_of(0, "ep", {0, 1}, {{0, 1, 1}})};
  EXPECT_DOUBLE_EQ(attribute_waits(ranks).unassigned, 1);
  EXPECT_EQ(attribute_waits({}).total(), 0);
}

TEST(CollectWaits, SortsAndClassifies) {
  using Clock = CommEvent::Clock;
  using std::chrono::seconds;
  const Clock::time_point origin = Clock::now();
  const auto event = [&](const char* group, CommKind kind, int begin, int end, int waited) {
    return CommEvent{.group = group,
                     .kind = kind,
                     .begin = origin + seconds(begin),
                     .end = origin + seconds(end),
                     .waited = seconds(waited)};
  };
  const std::vector<CommEvent> events = {
      event("ep", CommKind::kAllToAll, 5, 7, 1), event("ep", CommKind::kAllGather, 1, 9, 3),
      event("pp", CommKind::kReceive, 0, 4, 4), event("other", CommKind::kAllReduce, 0, 2, 2)};
  const RankWaits waits = collect_waits(3, events, origin, {{"ep", {3, 4}}}, false);
  ASSERT_EQ(waits.groups.at("ep").exchanges.size(), 2);
  EXPECT_DOUBLE_EQ(waits.groups.at("ep").exchanges[0].begin, 1);
  EXPECT_DOUBLE_EQ(waits.groups.at("ep").exchanges[0].waited, 3);
  EXPECT_DOUBLE_EQ(waits.messages, 4);
  EXPECT_DOUBLE_EQ(waits.unassigned, 2);
  // A device waits from where it has come to an exchange.
  const RankWaits device = collect_waits(3, events, origin, {{"ep", {3, 4}}}, true);
  EXPECT_DOUBLE_EQ(device.groups.at("ep").exchanges[0].waited, 8);
}

/// Ranks that meet again and again, of which one is slow.
TEST(GatherWaits, NamesASlowRank) {
  constexpr int64_t kSlow = 2;
  constexpr int kRounds = 5;
  run_thread_world(4, [&](World& world) {
    const CommunicatorPtr all = world.make_group("world", {0, 1, 2, 3});
    std::vector<CommEvent> events;
    all->barrier();
    const auto origin = CommEvent::Clock::now();
    world.statistics().observe([&](const CommEvent& event) { events.push_back(event); });
    for (int i = 0; i < kRounds; ++i) {
      if (world.rank() == kSlow) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      float value = 1;
      const Tensor tensor = view(std::span(&value, 1), {1});
      all->all_reduce(tensor, tensor).wait();
    }
    world.statistics().observe(nullptr);
    const RankWaits own =
        collect_waits(world.rank(), events, origin, {{"world", all->ranks()}}, false);
    const WaitReport report = gather_waits(own, *all);
    if (world.rank() != 0) return;
    ASSERT_FALSE(report.culprits.empty());
    EXPECT_EQ(report.culprits[0].rank, kSlow);
    EXPECT_GT(report.culprits[0].seconds, 0.8 * report.total());
    EXPECT_THAT(describe(report, 4, kRounds), HasSubstr("of which for rank 2"));
  });
}

}  // namespace
}  // namespace tessera
