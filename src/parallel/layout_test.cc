#include "parallel/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "core/error.h"
#include "core/random.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr std::array kDenseAxes = {Axis::kTp, Axis::kCp, Axis::kDp, Axis::kPp};
constexpr std::array kExpertAxes = {Axis::kEtp, Axis::kEp, Axis::kEdp, Axis::kPp};

TEST(Layout, FoldsExpertsOverTheDenseAxes) {
  // The folding of Parallel Folding's appendix: TP2 CP2 PP2 with EP8 ETP1 on 16 ranks.
  const Layout layout({.tp = 2, .cp = 2, .ep = 8, .pp = 2}, 16);
  EXPECT_EQ(layout.degree(Axis::kDp), 2);
  EXPECT_EQ(layout.degree(Axis::kEdp), 1);
  EXPECT_THAT(layout.group(5, Axis::kTp), ElementsAre(4, 5));
  EXPECT_THAT(layout.group(5, Axis::kCp), ElementsAre(5, 7));
  EXPECT_THAT(layout.group(5, Axis::kDp), ElementsAre(1, 5));
  EXPECT_THAT(layout.group(5, Axis::kPp), ElementsAre(5, 13));
  EXPECT_THAT(layout.group(5, Axis::kEp), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  EXPECT_THAT(layout.group(13, Axis::kEp), ElementsAre(8, 9, 10, 11, 12, 13, 14, 15));
}

TEST(Layout, GroupsOfThePaperWherePpIsInnerAndStridesAgree) {
  // generate_mappings(64, tp 2, cp 2, ep 2, etp 2, pp 2) of the paper's listing 1.
  const Layout layout({.tp = 2,
                       .cp = 2,
                       .etp = 2,
                       .ep = 2,
                       .pp = 2,
                       .dense_order = "tp-cp-pp-dp",
                       .expert_order = "etp-ep-pp-edp"},
                      64);
  EXPECT_THAT(layout.group(0, Axis::kPp), ElementsAre(0, 4));
  EXPECT_THAT(layout.group(0, Axis::kDp), ElementsAre(0, 8, 16, 24, 32, 40, 48, 56));
  EXPECT_THAT(layout.group(63, Axis::kEp), ElementsAre(61, 63));
}

TEST(Layout, GroupsOfSeveralAxesCountTheFirstFastest) {
  const Layout layout({.tp = 2, .cp = 3}, 12);
  constexpr std::array kAxes = {Axis::kCp, Axis::kTp};
  EXPECT_THAT(layout.group(7, kAxes), ElementsAre(6, 8, 10, 7, 9, 11));
  EXPECT_EQ(layout.groups(kAxes).size(), 2);
}

/// Divisors multiply to the ranks at random.
LayoutSpec random_spec(Random& random, int64_t num_ranks) {
  const auto divisor = [&](int64_t of) {
    std::vector<int64_t> divisors;
    for (int64_t d = 1; d <= of; ++d) {
      if (of % d == 0) divisors.push_back(d);
    }
    return divisors[random.next_below(divisors.size())];
  };
  LayoutSpec spec;
  spec.pp = divisor(num_ranks);
  const int64_t stage = num_ranks / spec.pp;
  spec.tp = divisor(stage);
  spec.cp = divisor(stage / spec.tp);
  spec.etp = divisor(stage);
  spec.ep = divisor(stage / spec.etp);
  const char* dense[] = {"tp-cp-dp-pp", "cp-tp-dp-pp", "dp-cp-tp-pp"};
  const char* expert[] = {"etp-ep-edp-pp", "ep-etp-edp-pp", "edp-ep-etp-pp"};
  spec.dense_order = dense[random.next_below(3)];
  spec.expert_order = expert[random.next_below(3)];
  return spec;
}

void expect_partition(const Layout& layout, Axis axis) {
  std::vector<int64_t> seen;
  for (const auto& group : layout.groups(axis)) {
    EXPECT_EQ(std::ssize(group), layout.degree(axis));
    for (size_t i = 0; i < group.size(); ++i) {
      EXPECT_EQ(layout.coordinate(group[i], axis), static_cast<int64_t>(i));
      EXPECT_EQ(layout.group(group[i], axis), group);
      seen.push_back(group[i]);
    }
  }
  std::ranges::sort(seen);
  std::vector<int64_t> all(layout.num_ranks());
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(seen, all);
}

TEST(Layout, EveryAxisPartitionsTheRanksAndCoordinatesNameThem) {
  Random random(1, 0);
  for (int trial = 0; trial < 300; ++trial) {
    const auto num_ranks = static_cast<int64_t>(random.next_below(48)) + 1;
    const Layout layout(random_spec(random, num_ranks), num_ranks);
    for (const auto& axes : {kDenseAxes, kExpertAxes}) {
      std::set<std::vector<int64_t>> names;
      for (int64_t rank = 0; rank < num_ranks; ++rank) {
        std::vector<int64_t> name;
        for (const Axis axis : axes) name.push_back(layout.coordinate(rank, axis));
        names.insert(name);
      }
      EXPECT_EQ(std::ssize(names), num_ranks) << "trial " << trial;
      for (const Axis axis : axes) expect_partition(layout, axis);
    }
  }
}

void expect_refused(const LayoutSpec& spec, int64_t num_ranks, const char* message) {
  EXPECT_THAT([&] { Layout(spec, num_ranks); }, ThrowsMessage<UserError>(HasSubstr(message)));
}

TEST(Layout, RefusalsNameTheProductAndTheNearestChoice) {
  expect_refused({.tp = 3}, 8, "tp 3 x cp 1 x pp 1 = 3 does not divide the 8 ranks; take 6 or 9");
  expect_refused({.tp = 2, .pp = 2}, 1, "tp 2 x cp 1 x pp 2 = 4 ranks, but there is 1; start 4");
  expect_refused({.tp = 2, .dp = 2}, 8,
                 "tp 2 x cp 1 x dp 2 x pp 1 = 4, but there are 8 ranks; dp 4 would fit");
  expect_refused({.tp = 3, .dp = 2}, 8, "= 6, but there are 8 ranks; take 6 ranks");
  expect_refused({.tp = 2, .ep = 3}, 8,
                 "etp 1 x ep 3 = 3 does not divide the 8 ranks of a pipeline stage (tp 2 x cp 1 x "
                 "dp 4); with etp 1 the nearest ep is 2 or 4");
  expect_refused({.etp = 3}, 8, "etp 3 does not divide the 8 ranks");
  expect_refused({.ep = 0}, 8, "parallel.ep is 0; it must be at least 1");
  expect_refused({.dense_order = "tp-cp-dp"}, 1, "must name each of tp, cp, dp, pp once");
  expect_refused({.dense_order = "tp-cp-ddp-pp"}, 1, "'ddp' is none of the axes");
  expect_refused({.tp = 2,
                  .cp = 2,
                  .ep = 2,
                  .pp = 2,
                  .dense_order = "tp-cp-pp-dp",
                  .expert_order = "etp-ep-pp-edp"},
                 16, "stages are 4 ranks apart by parallel.dense_order");
}

/// 2^32 · 2^32 is 0 in 64 bits.
TEST(Layout, RefusesDegreesWhoseProductsOverflow) {
  constexpr int64_t kHuge = int64_t{1} << 32;
  expect_refused({.tp = kHuge, .cp = kHuge}, 1, "parallel.tp is 4294967296; it must be at most");
  expect_refused({.dp = kHuge}, 1, "parallel.dp is 4294967296; it must be at most 1000000");
  expect_refused({.etp = kMaxRanks, .ep = kMaxRanks}, 1,
                 "etp 1000000 x ep 1000000 takes more than 1000000 ranks");
  expect_refused({.tp = kMaxRanks, .cp = kMaxRanks, .dp = kMaxRanks, .pp = kMaxRanks}, 1,
                 "tp 1000000 x cp 1000000 x pp 1000000 takes more than 1000000 ranks");
  expect_refused({}, kMaxRanks + 1, "a layout of 1000001 ranks");
}

TEST(Layout, TheFewestRanksFitBothFactorings) {
  EXPECT_EQ(least_ranks({}), 1);
  EXPECT_EQ(least_ranks({.ep = 8}), 8);
  EXPECT_EQ(least_ranks({.tp = 2, .cp = 2, .etp = 2, .ep = 3, .pp = 5}), 60);
  EXPECT_EQ(least_ranks({.tp = 2, .ep = 8, .pp = 2}), 16);
  EXPECT_EQ(least_ranks({.tp = 2, .dp = 3, .ep = 4}), 6) << "what is given counts";
  EXPECT_THAT([] { least_ranks({.tp = 999'983, .ep = 999'979}); },
              ThrowsMessage<UserError>(HasSubstr("fit stages of 999962000357 ranks")));
  EXPECT_THAT([] { least_ranks({.cp = 0}); }, ThrowsMessage<UserError>(HasSubstr("at least 1")));
}

/// Whatever the degrees, the fewest ranks make a layout.
TEST(Layout, TheFewestRanksMakeALayout) {
  Random random(2, 0);
  const auto draw = [&] { return 1 + static_cast<int64_t>(random.next_below(6)); };
  for (int trial = 0; trial < 200; ++trial) {
    const LayoutSpec spec{.tp = draw(), .cp = draw(), .etp = draw(), .ep = draw(), .pp = draw()};
    EXPECT_EQ(Layout(spec, least_ranks(spec)).num_ranks(), least_ranks(spec));
  }
}

TEST(Layout, DescribesItself) {
  const std::string text = describe_layout(Layout({.tp = 2, .ep = 4}, 4));
  EXPECT_THAT(text, HasSubstr("4 ranks; dense parts: tp 2 x cp 1 x dp 2 x pp 1; experts: etp 1"));
  EXPECT_THAT(text, HasSubstr("tp groups: [0 1] [2 3]"));
  EXPECT_THAT(text, HasSubstr("ep groups: [0 1 2 3]"));
}

}  // namespace
}  // namespace tessera
