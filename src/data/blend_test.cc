#include "data/blend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "core/random.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;

std::vector<double> random_weights(Random& random) {
  std::vector<double> weights(1 + random.next_below(9));
  for (double& weight : weights) {
    weight = static_cast<double>(random.next_below(random.next_below(2) == 0 ? 4 : 300));
  }
  weights[random.next_below(weights.size())] += 1;
  return weights;
}

TEST(BlendTest, IntegerWeights) {
  EXPECT_THAT(integer_weights({0.7, 0.3}, 1000), ElementsAre(7, 3));
  EXPECT_THAT(integer_weights({1, 0, 1}, 1000), ElementsAre(1, 0, 1));
  EXPECT_THAT(integer_weights({0.125, 0.5}, 1000), ElementsAre(1, 4));
  EXPECT_THAT(integer_weights({3e12, 1e12}, 1000), ElementsAre(3, 1));
  EXPECT_THAT(integer_weights({0.333, 0.667}, 1000), ElementsAre(333, 667));
  // What does not fit is rounded; what is above 0 stays so.
  EXPECT_THAT(integer_weights({1.0 / 3, 2.0 / 3}, 1000), ElementsAre(333, 667));
  EXPECT_THAT(integer_weights({1, 1e9}, 1000), ElementsAre(1, 999));
  EXPECT_THAT(integer_weights({1e308, 1e308}, 1000), ElementsAre(500, 500));
}

/// At any prefix every dataset has its share to within one sample.
TEST(BlendTest, SharesAreKeptAtEveryPrefix) {
  Random random(1, 0);
  for (int round = 0; round < 200; ++round) {
    const std::vector<double> weights = random_weights(random);
    const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
    const DrawOrder order(weights);
    ASSERT_LE(order.period(), static_cast<int64_t>(total));
    std::vector<int64_t> drawn(weights.size(), 0);
    for (int64_t sample = 0; sample < 2 * order.period() + 5; ++sample) {
      for (size_t i = 0; i < weights.size(); ++i) {
        const double share = weights[i] / total * static_cast<double>(sample);
        ASSERT_LT(std::abs(static_cast<double>(drawn[i]) - share), 1 - 1e-9 + 2e-9) << sample;
        ASSERT_EQ(order.count(static_cast<int64_t>(i), sample), drawn[i]);
      }
      const Draw draw = order.at(sample);
      ASSERT_EQ(draw.index, drawn[draw.dataset]++);
    }
  }
}

TEST(BlendTest, FarSamplesAreReachedAtOnce) {
  const DrawOrder order({0.7, 0.3});
  const Draw draw = order.at(1'000'000'000'000'000'003);
  EXPECT_EQ(draw.index, order.count(draw.dataset, 1'000'000'000'000'000'003));
  EXPECT_EQ(order.count(0, 1'000'000'000'000'000'000), 700'000'000'000'000'000);
  EXPECT_EQ(order.count(1, 1'000'000'000'000'000'000), 300'000'000'000'000'000);
  const DrawOrder longest({1, 1'048'575});
  EXPECT_EQ(longest.period(), DrawOrder::kMaxPeriod);
  EXPECT_EQ(longest.count(0, 3 * DrawOrder::kMaxPeriod), 3);
}

/// Each dataset's samples are 0, 1, 2, ... whatever phases they fall into.
TEST(BlendTest, ChangesCarryOnWhereEachDatasetIs) {
  Random random(2, 0);
  for (int round = 0; round < 100; ++round) {
    const size_t num_datasets = 1 + random.next_below(5);
    std::vector<BlendPhase> phases;
    int64_t first = 0;
    for (uint64_t phase = 0; phase <= random.next_below(4); ++phase) {
      std::vector<double> weights(num_datasets);
      for (double& weight : weights) weight = static_cast<double>(random.next_below(8));
      weights[random.next_below(num_datasets)] += 1;
      phases.push_back({first, weights});
      first += 1 + static_cast<int64_t>(random.next_below(60));
    }
    const Blend blend(phases);
    std::vector<int64_t> drawn(num_datasets, 0);
    for (int64_t sample = 0; sample < first + 50; ++sample) {
      for (size_t i = 0; i < num_datasets; ++i) {
        ASSERT_EQ(blend.count(static_cast<int64_t>(i), sample), drawn[i]);
      }
      const Draw draw = blend.at(sample);
      ASSERT_EQ(draw.index, drawn[draw.dataset]++);
      const auto phase = std::ranges::find_if(
          phases.rbegin(), phases.rend(),
          [&](const BlendPhase& candidate) { return candidate.first_sample <= sample; });
      ASSERT_GT(phase->weights[draw.dataset], 0);
    }
    for (size_t i = 0; i < num_datasets; ++i) {
      EXPECT_EQ(Blend(phases).count(static_cast<int64_t>(i), first + 50), drawn[i]);
    }
  }
}

TEST(BlendTest, AnotherPhaseLeavesTheSamplesBeforeAsTheyWere) {
  const Blend before({{0, {0.7, 0.3, 0}}});
  const Blend after({{0, {0.7, 0.3, 0}}, {57, {1, 1, 2}}});
  for (int64_t sample = 0; sample < 57; ++sample) EXPECT_EQ(before.at(sample), after.at(sample));
}

}  // namespace
}  // namespace tessera
