#include "core/text/nearest.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(NearestDivisors, StandOnBothSides) {
  EXPECT_EQ(nearest_divisors(16, 3), "2 or 4");
  EXPECT_EQ(nearest_divisors(12, 5), "4 or 6");
  EXPECT_EQ(nearest_divisors(7, 3), "1 or 7");
}

TEST(NearestDivisors, AreOneWhereThereIsNoOther) {
  EXPECT_EQ(nearest_divisors(12, 4), "4");
  EXPECT_EQ(nearest_divisors(12, 20), "12");
  EXPECT_EQ(nearest_divisors(1, 1), "1");
  EXPECT_EQ(nearest_divisors(8, 0), "1");
  EXPECT_EQ(nearest_divisors(8, -3), "1");
}

TEST(NearestChoices, AreTheTwoThatAreNearest) {
  EXPECT_EQ(nearest_choices({1, 2, 4, 8}, 3), "2 or 4");
  EXPECT_EQ(nearest_choices({8, 2, 4}, 9), "4 or 8");
  EXPECT_EQ(nearest_choices({6}, 9), "6");
}

}  // namespace
}  // namespace tessera
