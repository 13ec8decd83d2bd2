#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>

#include "train/testing/random_layout.h"
#include "train/verify.h"

namespace tessera {
namespace {

/// 200 random models on random layouts of up to 16 ranks. TESSERA_LAYOUT_SEED=n repeats one of
/// them.
TEST(AllLayouts, GiveTheGradientsOfOneRank) {
  const char* one = std::getenv("TESSERA_LAYOUT_SEED");
  const uint64_t first = one != nullptr ? std::strtoull(one, nullptr, 10) : 1001;
  const uint64_t count = one != nullptr ? 1 : 200;
  double worst = 0;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    const testing::RandomLayout layout = testing::draw_layout(seed, 16);
    const Verification result =
        verify_layout({.settings = layout.settings, .num_ranks = layout.num_ranks});
    worst = std::max(worst, result.worst());
    EXPECT_TRUE(result.agrees()) << "TESSERA_LAYOUT_SEED=" << seed << ": "
                                 << testing::describe(layout) << "\n"
                                 << describe(result, false);
  }
  std::cout << count << " layouts, worst error " << worst << "\n";
}

}  // namespace
}  // namespace tessera
