#include "train/state/local_matrices.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "comm/planned_world.h"
#include "core/error.h"

namespace tessera {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

/// Ranks that hold the parts of a weight, seen from one of them.
CommunicatorPtr parts(int64_t size, int64_t rank) {
  std::vector<int64_t> ranks(size);
  std::iota(ranks.begin(), ranks.end(), int64_t{0});
  return make_planned_world(rank, size)->make_group("parts", ranks);
}

/// Two experts of 4 and 6 inner columns, gate and up each.
WeightPlacement experts(std::vector<IndexRange> rows) {
  return {.slice = Slice::of_rows({20, 4}, std::move(rows)),
          .expert = true,
          .matrix_rows = {4, 4, 6, 6}};
}

WeightPlacement columns(IndexRange range) {
  return {.slice = Slice::of_columns({6, 8}, range), .matrix_rows = {4, 2}};
}

TEST(LocalMatrices, AreThoseOfTheRowsThatARankHolds) {
  const CommunicatorPtr alone = parts(1, 0);
  const auto rows = [&](const WeightPlacement& placement) {
    const LocalMatrices local = local_matrices("e", placement, alone);
    EXPECT_EQ(local.cut, MatrixCut());
    return local.rows;
  };
  EXPECT_THAT(rows(experts({{0, 20}})), ElementsAre(4, 4, 6, 6));
  EXPECT_THAT(rows(experts({{8, 6}, {14, 6}})), ElementsAre(6, 6));
  EXPECT_THAT(rows(experts({{0, 4}, {14, 6}})), ElementsAre(4, 6));
  EXPECT_THAT(rows(experts({})), IsEmpty());
  EXPECT_THAT(rows({.slice = Slice::whole({16})}), IsEmpty());
}

TEST(LocalMatrices, AreWholeWhereOtherWeightsAreCut) {
  const LocalMatrices local = local_matrices("e", experts({{0, 20}}), parts(2, 1));
  EXPECT_THAT(local.rows, ElementsAre(4, 4, 6, 6));
  EXPECT_EQ(local.cut.parts, nullptr);
}

TEST(LocalMatrices, AreEqualPartsInTheOrderOfTheRanks) {
  const CommunicatorPtr second = parts(2, 1);
  const LocalMatrices by_rows =
      local_matrices("e", experts({{2, 2}, {6, 2}, {11, 3}, {17, 3}}), second);
  EXPECT_THAT(by_rows.rows, ElementsAre(2, 2, 3, 3));
  EXPECT_EQ(by_rows.cut.parts, second);
  EXPECT_FALSE(by_rows.cut.by_columns);
  const LocalMatrices by_columns = local_matrices("o", columns({4, 4}), second);
  EXPECT_THAT(by_columns.rows, ElementsAre(4, 2));
  EXPECT_EQ(by_columns.cut.parts, second);
  EXPECT_TRUE(by_columns.cut.by_columns);
}

TEST(LocalMatrices, AreRefusedInUnequalParts) {
  const auto expect_refused = [](const WeightPlacement& placement, int64_t rank) {
    try {
      local_matrices("layers.0.moe.experts.gate_up.weight", placement, parts(2, rank));
      ADD_FAILURE() << placement.slice.to_string();
    } catch (const UserError& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr("'layers.0.moe.experts.gate_up.weight'"));
      EXPECT_THAT(error.what(), testing::HasSubstr("parallel.tp"));
    }
  };
  expect_refused(experts({{0, 1}}), 0);
  expect_refused(experts({{0, 4}, {4, 2}}), 0);
  expect_refused(experts({{2, 4}}), 0);
  expect_refused(experts({{0, 2}, {4, 2}, {8, 3}, {14, 3}}), 1);
  expect_refused(columns({0, 4}), 1);
  expect_refused(columns({0, 2}), 0);
  expect_refused({.slice = Slice{.global = {6, 8}, .rows = {{0, 2}}, .columns = {0, 4}},
                  .matrix_rows = {4, 2}},
                 0);
}

}  // namespace
}  // namespace tessera
