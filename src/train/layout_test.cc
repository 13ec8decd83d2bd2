#include <gtest/gtest.h>

#include <cstdlib>

#include "train/testing/random_layout.h"
#include "train/verify.h"

namespace tessera {
namespace {

void expect_agreement(uint64_t seed, int64_t max_ranks) {
  const testing::RandomLayout layout = testing::draw_layout(seed, max_ranks);
  const Verification result =
      verify_layout({.settings = layout.settings, .num_ranks = layout.num_ranks});
  EXPECT_TRUE(result.agrees()) << "seed " << seed << ": " << testing::describe(layout) << "\n"
                               << describe(result, false);
}

/// Gradients that travel as BF16 agree within its rounding.
TEST(RandomLayouts, CompressedGradientsAgreeWithinTheirRounding) {
  for (uint64_t seed = 301; seed < 307; ++seed) {
    testing::RandomLayout layout = testing::draw_layout(seed, 8);
    layout.settings.sharding.reduction.compression = GradientCompression::kBf16;
    const Verification result =
        verify_layout({.settings = layout.settings, .num_ranks = layout.num_ranks, .steps = 1});
    for (const ParameterDifference& p : result.parameters)
      EXPECT_LT(p.gradient.error, 0x1.0p-7) << "seed " << seed << ": " << p.name;
  }
}

/// TESSERA_LAYOUT_SEED=n runs that case alone.
class AnyLayout : public ::testing::TestWithParam<uint64_t> {};

TEST_P(AnyLayout, GiveTheGradientsOfOneRank) {
  expect_agreement(GetParam(), 8);
}

std::vector<uint64_t> seeds(uint64_t count) {
  if (const char* one = std::getenv("TESSERA_LAYOUT_SEED"))
    return {std::strtoull(one, nullptr, 10)};
  std::vector<uint64_t> all;
  for (uint64_t seed = 1; seed <= count; ++seed) all.push_back(seed);
  return all;
}

INSTANTIATE_TEST_SUITE_P(Seeds, AnyLayout, ::testing::ValuesIn(seeds(10)));

}  // namespace
}  // namespace tessera
