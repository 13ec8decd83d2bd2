#include "train/state/local_matrices.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"

namespace tessera {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

/// Two experts of 3 and 5 inner columns, gate and up each.
WeightPlacement experts(std::vector<IndexRange> rows) {
  return {.slice = Slice::of_rows({16, 4}, std::move(rows)),
          .expert = true,
          .matrix_rows = {3, 3, 5, 5}};
}

TEST(LocalMatrices, AreThoseOfTheRowsThatARankHolds) {
  EXPECT_THAT(local_matrices("e", experts({{0, 16}})), ElementsAre(3, 3, 5, 5));
  EXPECT_THAT(local_matrices("e", experts({{6, 5}, {11, 5}})), ElementsAre(5, 5));
  EXPECT_THAT(local_matrices("e", experts({{0, 3}, {11, 5}})), ElementsAre(3, 5));
  EXPECT_THAT(local_matrices("e", experts({})), IsEmpty());
  EXPECT_THAT(local_matrices("n", {.slice = Slice::whole({16})}), IsEmpty());
}

TEST(LocalMatrices, AreNotCut) {
  const auto expect_refused = [](const WeightPlacement& placement) {
    try {
      local_matrices("layers.0.moe.experts.gate_up.weight", placement);
      ADD_FAILURE() << placement.slice.to_string();
    } catch (const UserError& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr("'layers.0.moe.experts.gate_up.weight'"));
      EXPECT_THAT(error.what(), testing::HasSubstr("parallel.tp"));
    }
  };
  expect_refused(experts({{0, 2}}));
  expect_refused(experts({{0, 3}, {4, 2}}));
  expect_refused(experts({{5, 2}}));
  expect_refused({.slice = Slice::of_columns({6, 8}, {0, 4}), .matrix_rows = {6}});
}

}  // namespace
}  // namespace tessera
