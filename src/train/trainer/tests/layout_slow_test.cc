#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>

#include "train/testing/random_layout.h"
#include "train/verify/verify.h"

namespace tessera {
namespace {

/// Some seeds in a row, or the one that TESSERA_LAYOUT_SEED names, to repeat it.
struct Seeds {
  uint64_t first = 0;
  uint64_t count = 0;
};

Seeds choose_seeds(uint64_t first, uint64_t count) {
  const char* one = std::getenv("TESSERA_LAYOUT_SEED");
  if (one == nullptr) return {first, count};
  return {std::strtoull(one, nullptr, 10), 1};
}

/// Some draws make roundings larger: Muon turns a tiny gradient into a whole update, decays
/// multiply over a row. What is not summed, or summed twice, is off by far more.
constexpr double kTolerance = 5e-4;

Verification verify(uint64_t seed, const testing::RandomLayout& layout) {
  const std::string place =
      fmt::format("TESSERA_LAYOUT_SEED={}: {}", seed, testing::describe(layout));
  try {
    Verification result = verify_layout(
        {.settings = layout.settings, .num_ranks = layout.num_ranks, .tolerance = kTolerance});
    EXPECT_TRUE(result.agrees()) << place << "\n" << describe(result, false);
    return result;
  } catch (const std::exception& error) {
    ADD_FAILURE() << place << "\n" << error.what();
    return {};
  }
}

/// 200 random models on random layouts of up to 16 ranks.
TEST(AllLayouts, GiveTheGradientsOfOneRank) {
  const Seeds seeds = choose_seeds(1001, 200);
  double gradient = 0;
  double weight = 0;
  double scalar = 0;
  for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count; ++seed) {
    const Verification result = verify(seed, testing::draw_layout(seed, 16));
    gradient = std::max(gradient, result.worst_gradient());
    weight = std::max(weight, result.worst_weight());
    scalar = std::max(scalar, result.worst_scalar());
  }
  std::cout << fmt::format(
      "{} layouts, worst error of gradients {:.1e}, weights {:.1e}, losses and counts {:.1e}\n",
      seeds.count, gradient, weight, scalar);
}

/// 40 with gradients that travel as BF16.
TEST(AllLayouts, CompressedGradientsAgreeWithinTheirRounding) {
  const Seeds seeds = choose_seeds(2001, 40);
  double least = 1;
  double most = 0;
  double weight = 0;
  for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count; ++seed) {
    const testing::RandomLayout layout = testing::draw_compressed_layout(seed, 16);
    const Verification result = verify(seed, layout);
    most = std::max(most, result.worst_gradient());
    weight = std::max(weight, result.worst_weight());
    if (!testing::sends_compressed(layout)) continue;
    least = std::min(least, result.worst_gradient());
    EXPECT_GT(result.worst_gradient(), testing::kLeastRounding) << "TESSERA_LAYOUT_SEED=" << seed;
  }
  std::cout << fmt::format(
      "{} layouts, worst error of gradients {:.1e} to {:.1e}, weights {:.1e}\n", seeds.count, least,
      most, weight);
}

}  // namespace
}  // namespace tessera
