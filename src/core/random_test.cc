#include "core/random.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <numbers>
#include <vector>

namespace tessera {
namespace {

// The numbers' definition, in double precision except for the first uniform number.
std::vector<double> box_muller(size_t count, uint64_t seed, uint64_t stream) {
  std::vector<double> values;
  for (uint32_t block = 0; values.size() < count + 4; ++block) {
    const auto words =
        philox({block, 0, static_cast<uint32_t>(stream), static_cast<uint32_t>(stream >> 32)},
               {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
    for (const size_t pair : {0, 2}) {
      const double uniform = (static_cast<float>(words[pair] >> 8) + 0.5F) * 0x1.0p-24F;
      const double angle = 2 * std::numbers::pi * (words[pair + 1] >> 8) * 0x1.0p-24;
      const double radius = std::sqrt(-2 * std::log(uniform));
      values.push_back(radius * std::cos(angle));
      values.push_back(radius * std::sin(angle));
    }
  }
  values.resize(count);
  return values;
}

TEST(FillNormal, IsBoxAndMullersTransform) {
  for (const size_t count : {0, 1, 3, 63, 64, 65, 127, 200001}) {
    const uint64_t stream = (uint64_t{7} << 40) + count;
    std::vector<float> values(count);
    fill_normal(values, 3, stream, 2.0F);
    const std::vector<double> expected = box_muller(count, 3, stream);
    for (size_t i = 0; i < count; ++i)
      ASSERT_NEAR(values[i], 2 * expected[i], 2e-6 * (1 + std::abs(expected[i]))) << i;
  }
}

TEST(FillNormal, BeginsAlikeWhateverTheLength) {
  std::vector<float> many(1000);
  fill_normal(many, 1, 2, 1.0F);
  for (const size_t count : {1, 30, 64, 999}) {
    std::vector<float> few(count);
    fill_normal(few, 1, 2, 1.0F);
    EXPECT_TRUE(std::equal(few.begin(), few.end(), many.begin()));
  }
}

TEST(FillNormal, HasTheMomentsOfTheNormalDistribution) {
  std::vector<float> values(1 << 20);
  fill_normal(values, 11, 5, 1.0F);
  std::array<double, 5> moments{};
  for (const float x : values) {
    double power = 1;
    for (double& moment : moments) {
      moment += power / static_cast<double>(values.size());
      power *= x;
    }
  }
  EXPECT_NEAR(moments[1], 0, 5e-3);
  EXPECT_NEAR(moments[2], 1, 1e-2);
  EXPECT_NEAR(moments[3], 0, 2e-2);
  EXPECT_NEAR(moments[4], 3, 5e-2);
}

}  // namespace
}  // namespace tessera
