#include "model/weights/rounding_history.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>

#include "core/fp8.h"
#include "core/random.h"
#include "model/run/model_testing.h"
#include "ops/round_values/recipes.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;

RoundingHistory make_history(const DelayedScaling& scaling,
                             const char* recipe = "tensorwise_delayed") {
  BatchShape shape = testing::tiny_shape(1, 8, DType::kBF16);
  shape.products = {.recipe = &find_recipe(recipe), .delayed = scaling};
  return {testing::tiny_config(), shape, host_device()};
}

/// A tally for each layer, of random magnitudes.
std::vector<LayerTally> draw_tallies(const RoundingHistory& history, Random& random) {
  std::vector<LayerTally> tallies;
  for (const RoundingHistory::Layer& layer : history.layers()) {
    LayerTally& tally = tallies.emplace_back(layer.num_rows());
    for (int64_t& amax : tally.amax) {
      const auto value = static_cast<float>(std::exp(4 * random.next_normal()));
      amax = random.next_below(5) == 0 ? 0 : std::bit_cast<uint32_t>(value);
    }
  }
  return tallies;
}

float amax_of(const LayerTally& tally, int64_t row) {
  return std::bit_cast<float>(static_cast<uint32_t>(tally.amax[row]));
}

/// By looking back at all steps there were.
float plain_scale(const std::vector<std::vector<LayerTally>>& steps, size_t layer, int64_t row,
                  const DelayedScaling& scaling) {
  float chosen = 0;
  for (int64_t back = 0; back < std::min(scaling.history, std::ssize(steps)); ++back) {
    const float amax = amax_of(steps[steps.size() - 1 - back][layer], row);
    const bool decided = scaling.choice == AmaxChoice::kMostRecent && chosen > 0;
    if (!decided) chosen = std::max(chosen, amax);
  }
  if (chosen == 0) return 0;
  const float largest = row % 3 == 2 ? kLargestE5m2 : kLargestE4m3;
  float scale = 1;
  while (largest * scale < chosen) scale *= 2;
  while (largest * scale / 2 >= chosen) scale /= 2;
  return std::ldexp(scale, static_cast<int>(scaling.margin));
}

TEST(RoundingHistory, ScalesAreThoseOfAPlainLookBack) {
  for (const DelayedScaling& scaling :
       {DelayedScaling{.history = 1}, DelayedScaling{.history = 3},
        DelayedScaling{.history = 4, .choice = AmaxChoice::kMostRecent},
        DelayedScaling{.history = 5, .margin = 2}, DelayedScaling{}}) {
    RoundingHistory history = make_history(scaling);
    Random random(5, 1);
    std::vector<std::vector<LayerTally>> steps;
    for (int step = 0; step < 9; ++step) {
      for (size_t i = 0; i < history.layers().size(); ++i) {
        const std::vector<float> scales = history.scales(history.layers()[i]);
        for (int64_t row = 0; row < std::ssize(scales); ++row)
          ASSERT_EQ(scales[row], plain_scale(steps, i, row, scaling))
              << "step " << step << " row " << row << " history " << scaling.history;
      }
      steps.push_back(draw_tallies(history, random));
      history.add(steps.back(), false);
    }
  }
}

/// A step that was skipped may have been so for what it overflowed by, and is not looked back at
/// otherwise.
TEST(RoundingHistory, OfSkippedStepsKeepsWhatSaturated) {
  RoundingHistory history = make_history({.history = 4});
  Random random(6, 1);
  std::vector<LayerTally> tallies = draw_tallies(history, random);
  tallies[0].amax[1] = std::bit_cast<uint32_t>(900.0F);
  tallies[0].saturated[1] = 1;
  history.add(tallies, true);
  const std::vector<float> scales = history.scales(history.layers()[0]);
  for (size_t row = 0; row < scales.size(); ++row) EXPECT_EQ(scales[row], row == 1 ? 4 : 0);
}

TEST(RoundingHistory, IsOfRecipesWithDelayedScalesAlone) {
  for (const Recipe& recipe : recipes()) {
    const RoundingHistory history = make_history({}, recipe.name.data());
    EXPECT_EQ(history.is_empty(), !recipe.is_delayed());
    EXPECT_EQ(history.slices().empty(), !recipe.is_delayed());
  }
  const RoundingHistory history = make_history({.history = 7});
  EXPECT_EQ(std::ssize(history.layers()), testing::tiny_config().all_layers());
  for (const NamedSlice& slice : history.slices()) {
    EXPECT_TRUE(RoundingHistory::names(slice.name)) << slice.name;
    EXPECT_EQ(slice.tensor.shape[1], 7);
  }
  EXPECT_FALSE(RoundingHistory::names("layers.0.moe.expert_bias"));
}

TEST(RoundingHistory, TakesTheNewestStepsOfAnother) {
  const OwnedTensor from(DType::kF32, {2, 3});
  std::ranges::copy(std::vector<float>{1, 2, 3, 4, 5, 6}, from.get().as<float>());
  const OwnedTensor shorter(DType::kF32, {2, 2});
  RoundingHistory::copy_newest(from, shorter);
  EXPECT_THAT(shorter.get().span<float>(), ElementsAre(1, 2, 4, 5));
  const OwnedTensor longer(DType::kF32, {2, 5});
  std::ranges::fill(longer.get().span<float>(), 9.0F);
  RoundingHistory::copy_newest(from, longer);
  EXPECT_THAT(longer.get().span<float>(), ElementsAre(1, 2, 3, 0, 0, 4, 5, 6, 0, 0));
}

TEST(RoundingCounts, AreTheLargestSharesOfEachKind) {
  LayerTally tally(6);
  tally.values = {100, 100, 200, 50, 0, 100};
  tally.saturated = {1, 0, 2, 1, 0, 3};
  tally.nonfinite = {0, 0, 0, 0, 0, 50};
  const RoundingCounts counts = count_roundings(7, tally);
  EXPECT_EQ(counts.layer, 7);
  EXPECT_THAT(counts.saturated, ElementsAre(0.02, 0, 0.03));
  EXPECT_THAT(counts.nonfinite, ElementsAre(0, 0, 0.5));
  EXPECT_EQ(counts.most_nonfinite(), 0.5);
}

}  // namespace
}  // namespace tessera
