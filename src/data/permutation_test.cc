#include "data/permutation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "core/error.h"

namespace tessera {
namespace {

std::vector<uint64_t> images(uint64_t size, uint64_t key) {
  const Permutation permutation(size, key);
  std::vector<uint64_t> images(size);
  for (uint64_t i = 0; i < size; ++i) images[i] = permutation(i);
  return images;
}

TEST(PermutationTest, IsABijectionForEverySize) {
  std::vector<uint64_t> sizes(70);
  std::iota(sizes.begin(), sizes.end(), uint64_t{1});
  sizes.insert(sizes.end(), {127, 128, 129, 255, 256, 257, 1000, 4095, 4096, 4097, 65'537});
  for (const uint64_t size : sizes) {
    std::vector<uint64_t> sorted = images(size, size * 31);
    std::ranges::sort(sorted);
    for (uint64_t i = 0; i < size; ++i) ASSERT_EQ(sorted[i], i) << "size " << size;
  }
}

TEST(PermutationTest, IsInjectiveOnHugeSizes) {
  for (const uint64_t size : {(uint64_t{1} << 40) + 12'345, UINT64_MAX}) {
    const Permutation permutation(size, 5);
    std::vector<uint64_t> seen;
    for (uint64_t i = 0; i < 2000; ++i) seen.push_back(permutation(size - 1 - i));
    EXPECT_TRUE(std::ranges::all_of(seen, [size](uint64_t image) { return image < size; }));
    std::ranges::sort(seen);
    EXPECT_EQ(std::ranges::adjacent_find(seen), seen.end());
  }
}

TEST(PermutationTest, IsAPureFunctionOfSizeAndKey) {
  EXPECT_EQ(images(1000, 1), images(1000, 1));
  EXPECT_NE(images(1000, 1), images(1000, 2));
  EXPECT_NE(images(1000, 1), images(1000, uint64_t{1} << 32 | 1));
}

/// Each index should be about equally likely to land anywhere: chi-squared over 16 by 16 cells,
/// with 225 degrees of freedom, stays below 400 except for one key in 10^11.
TEST(PermutationTest, SpreadsEvenlyOverKeys) {
  constexpr uint64_t kSize = 16;
  constexpr int kKeys = 16'000;
  std::vector<double> counts(kSize * kSize);
  for (int key = 0; key < kKeys; ++key) {
    const Permutation permutation(kSize, static_cast<uint64_t>(key));
    for (uint64_t i = 0; i < kSize; ++i) counts[i * kSize + permutation(i)] += 1;
  }
  const double expected = static_cast<double>(kKeys) / kSize;
  double chi_squared = 0;
  for (const double count : counts) {
    chi_squared += (count - expected) * (count - expected) / expected;
  }
  EXPECT_LT(chi_squared, 400);
  EXPECT_GT(chi_squared, 100);
}

/// A shuffle of n has about one fixed point and about n / 3 in mean displacement.
TEST(PermutationTest, LooksLikeAShuffle) {
  const std::vector<uint64_t> shuffled = images(9000, 3);
  double displacement = 0;
  int fixed = 0;
  for (size_t i = 0; i < shuffled.size(); ++i) {
    displacement += std::abs(static_cast<double>(shuffled[i]) - static_cast<double>(i)) / 9000.0;
    fixed += shuffled[i] == i ? 1 : 0;
  }
  EXPECT_NEAR(displacement / 3000.0, 1.0, 0.05);
  EXPECT_LT(fixed, 10);
}

TEST(PermutationTest, RefusesWhatIsOutside) {
  EXPECT_THROW(Permutation(0, 1), InternalError);
  EXPECT_THROW(Permutation(3, 1)(3), InternalError);
}

}  // namespace
}  // namespace tessera
