#include "sim/routing_counts.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(RoutingCounts, AreBalancedWhereNothingIsKnown) {
  const RoutingCounts counts;
  EXPECT_TRUE(counts.empty());
  EXPECT_EQ(counts.skew(0, 8), 1);
}

TEST(RoutingCounts, GiveTheFullestRanksShare) {
  RoutingCounts counts;
  counts.add(1, {10, 30, 20, 20});
  EXPECT_EQ(counts.num_experts(), 4);
  EXPECT_DOUBLE_EQ(counts.skew(1, 1), 1);
  EXPECT_DOUBLE_EQ(counts.skew(1, 2), 1) << "neighbours make up for each other";
  EXPECT_DOUBLE_EQ(counts.skew(1, 4), 1.5);
  EXPECT_DOUBLE_EQ(counts.skew(1, 3), 1) << "which experts do not divide";
  counts.add(1, {40, 40, 0, 0});  // another step
  EXPECT_DOUBLE_EQ(counts.skew(1, 2), 1.5);
  EXPECT_DOUBLE_EQ(counts.skew(1, 4), 1.75);
  counts.add(3, {0, 0, 0, 0});
  EXPECT_DOUBLE_EQ(counts.skew(3, 4), 1) << "nothing came";
  EXPECT_DOUBLE_EQ(counts.skew(2, 2), 1.25) << "the mean of the layers that were counted";
}

}  // namespace
}  // namespace tessera
