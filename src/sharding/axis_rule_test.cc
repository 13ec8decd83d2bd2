#include "sharding/axis_rule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

const ShardState kSame = ShardState::replicated();
const ShardState kSum = ShardState::partial();
const ShardState kOwn = ShardState::varying();
ShardState cut(int dim) {
  return ShardState::sharded(dim);
}
ShardState by_expert(int dim) {
  return ShardState::by_expert(dim);
}

std::vector<ShardState> apply(std::string_view rule, const std::vector<ShardState>& inputs,
                              RankAxis axis = RankAxis::kTpParts) {
  return AxisRule(rule).apply(axis, inputs).value();
}

void expect_fault(std::string_view rule, const std::vector<ShardState>& inputs,
                  const std::string& what) {
  EXPECT_THAT([&] { apply(rule, inputs); }, ThrowsMessage<ShardFault>(HasSubstr(what)));
}

constexpr std::string_view kProduct = "x:th w:oh -> y:to=xw";

TEST(AxisRule, ProductsArePartsOrPartialSums) {
  EXPECT_THAT(apply(kProduct, {kSame, kSame}), ElementsAre(kSame));
  EXPECT_THAT(apply(kProduct, {cut(0), kSame}), ElementsAre(cut(0)));  // other tokens
  EXPECT_THAT(apply(kProduct, {kSame, cut(0)}), ElementsAre(cut(1)));  // column-parallel
  EXPECT_THAT(apply(kProduct, {cut(1), cut(1)}), ElementsAre(kSum));   // row-parallel
  EXPECT_THAT(apply(kProduct, {kSum, kSame}), ElementsAre(kSum));      // linear
}

TEST(AxisRule, FactorsMustBeCutAlike) {
  expect_fault(kProduct, {cut(1), kSame}, "operand 1 is whole along a dim of which another");
  expect_fault(kProduct, {cut(0), cut(0)}, "cut along another dim");
  expect_fault(kProduct, {kSum, kSum}, "partial sums are multiplied");
  expect_fault(kProduct, {kSum, cut(0)}, "is a partial sum where another is cut");
  expect_fault(kProduct, {cut(1), kOwn}, "each rank's own");
}

TEST(AxisRule, WhatIsAddedMustBeOfOneKind) {
  constexpr std::string_view kBiased = "x:th w:oh b:o -> y:to=xw+b";
  EXPECT_THAT(apply(kBiased, {cut(0), kSame, kSame}), ElementsAre(cut(0)));
  EXPECT_THAT(apply(kBiased, {kSame, cut(0), cut(0)}), ElementsAre(cut(1)));
  expect_fault(kBiased, {cut(1), cut(1), kSame}, "would count the latter once for each");
  expect_fault(kBiased, {kSame, cut(0), kSame}, "operand 2 is whole");
  // An operand that is not there is no summand.
  EXPECT_THAT(apply(kBiased, {cut(1), cut(1)}), ElementsAre(kSum));
}

TEST(AxisRule, OnlySumsTakePartialSums) {
  expect_fault("x:tf -> y:tf", {kSum}, "of which only the total may be used");
  EXPECT_THAT(apply("x:tf g:tf -> dx:tf=g", {kSame, kSum}), ElementsAre(kSum));
  expect_fault("x:tf g:tf -> dx:tf=g", {kSum, kSame}, "operand 0 is a partial sum");
}

TEST(AxisRule, CapitalsAreNeverCut) {
  EXPECT_THAT(apply("x:tH w:H -> y:tH", {cut(0), kSame}), ElementsAre(cut(0)));
  expect_fault("x:tH w:H -> y:tH", {cut(1), cut(0)}, "the whole of a dim is needed");
}

TEST(AxisRule, StatisticsAreSumsOrEachRanksOwn) {
  EXPECT_THAT(apply("x:te -> m:e", {cut(0)}), ElementsAre(kOwn));
  EXPECT_THAT(apply("x:te -> m+:e", {cut(0)}), ElementsAre(kSum));
  EXPECT_THAT(apply("x:te -> m~:e", {cut(0)}), ElementsAre(kSum));
  // Micro-batches have their own, and of experts' axes nothing is known.
  EXPECT_THAT(apply("x:te -> m~:e", {cut(0)}, RankAxis::kDp), ElementsAre(kOwn));
  EXPECT_EQ(AxisRule("x:te -> m~:e").apply(RankAxis::kEp, std::vector{cut(0)}), std::nullopt);
}

TEST(AxisRule, RowsOfExpertsMeetTheWeightsOfThose) {
  constexpr std::string_view kGrouped = "a:r^h w:f^h -> y:r^f=aw";
  EXPECT_THAT(apply(kGrouped, {by_expert(0), by_expert(0)}), ElementsAre(by_expert(0)));
  EXPECT_THAT(apply(kGrouped, {kSame, cut(0)}), ElementsAre(cut(1)));
  expect_fault(kGrouped, {cut(0), by_expert(0)}, "cut along another dim");
  expect_fault(kGrouped, {by_expert(0), kSame}, "operand 1 is whole");
  expect_fault("x:th w:oh -> y:to=xw", {by_expert(0), kSame}, "each rank's own experts");
  EXPECT_THAT(apply("n:r^f x:r^h -> dw:f^h=nx", {by_expert(0), by_expert(0)}),
              ElementsAre(by_expert(0)));
  EXPECT_THAT(apply("n:r^f x:r^h -> dw:f^h=nx", {cut(0), cut(0)}), ElementsAre(kSum));
}

TEST(AxisRule, WhatIsNotReadMayBeAnything) {
  EXPECT_THAT(apply("x:t z:* -> y:t", {cut(0), kSum}), ElementsAre(cut(0)));
}

TEST(AxisRule, RefusesOtherText) {
  EXPECT_THROW(AxisRule("x:t y:t"), InternalError);
  EXPECT_THROW(AxisRule("x -> y:t"), InternalError);
  EXPECT_THROW(apply("x:t -> y:t=z", {kSame}), InternalError);
}

/// The transpose of the transpose is the value itself.
TEST(ShardState, DualsComeInPairs) {
  for (const ShardState& state : {kSame, kSum, kOwn, cut(1), by_expert(0)})
    EXPECT_EQ(state.dual().dual(), state);
  EXPECT_EQ(kSame.dual(), kSum);
  EXPECT_EQ(cut(1).dual(), cut(1));
}

}  // namespace
}  // namespace tessera
