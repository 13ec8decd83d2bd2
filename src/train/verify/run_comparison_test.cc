#include "train/verify/run_comparison.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr float kUpdate = 1e-4F;

/// Two tensors, weights of about 1 and updates of a ten-thousandth of that.
RunRecord make_record() {
  RunRecord record;
  record.start = {{"a", {{2}, {1.0F, -1.0F}}}, {"b", {{1}, {0.5F}}}};
  record.weights = {{"a", {{2}, {1.0F + kUpdate, -1.0F}}}, {"b", {{1}, {0.5F + kUpdate}}}};
  record.gradients = {{"a", {{2}, {1.0F, 0.25F}}}, {"b", {{1}, {1e-5F}}}};
  record.biases = {{"bias", {{2}, {0.125F, -0.125F}}}};
  record.outcomes = {{.loss = 4, .update = {.grad_norm = 2}}};
  record.loads = {{{3, 5}}};
  return record;
}

Verification compare(const RunRecord& layout, const Tolerances& tolerances = {}) {
  return compare_runs(layout, make_record(), {"a", "b"}, tolerances);
}

TEST(CompareRuns, FindsEqualRunsEqual) {
  const Verification result = compare(make_record());
  EXPECT_TRUE(result.agrees()) << describe(result, true);
  EXPECT_EQ(result.worst(), 0);
}

TEST(CompareRuns, MeasuresWeightsByTheirUpdates) {
  RunRecord layout = make_record();
  layout.weights.at("a").values[0] = 1.0F + 0.5F * kUpdate;
  const Verification result = compare(layout);
  EXPECT_FALSE(result.agrees());
  EXPECT_NEAR(result.parameters[0].weight.error, 0.5, 0.01);
  EXPECT_THAT(describe(result, true), HasSubstr("first to differ: the weight of a at [0]"));
}

TEST(CompareRuns, LeavesOutTheRoundingOfWeights) {
  RunRecord layout = make_record();
  layout.weights.at("a").values[0] = std::nextafter(layout.weights.at("a").values[0], 2.0F);
  EXPECT_EQ(compare(layout).parameters[0].weight.error, 0);
}

TEST(CompareRuns, MeasuresSmallGradientsByAThousandthOfTheLargest) {
  RunRecord layout = make_record();
  layout.gradients.at("b").values[0] += 2e-7F;
  EXPECT_NEAR(compare(layout).parameters[1].gradient.error, 2e-4, 1e-6);
}

TEST(CompareRuns, NoNumberAgreesWithNothing) {
  RunRecord layout = make_record();
  layout.gradients.at("b").values[0] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_FALSE(compare(layout).agrees());
  layout = make_record();
  layout.gradients.erase("b");
  EXPECT_FALSE(compare(layout).agrees());
}

TEST(CompareRuns, ComparesRoutingBiasesAndCopies) {
  RunRecord layout = make_record();
  layout.loads = {{{4, 4}}};
  EXPECT_EQ(compare(layout).moved_assignments, 1);
  EXPECT_FALSE(compare(layout).agrees());
  EXPECT_THAT(describe(compare(layout), true), HasSubstr("1 assignments went to other experts"));
  layout = make_record();
  layout.biases.at("bias").values[1] = 0.125F;
  EXPECT_EQ(compare(layout).first_disagreement()->name, "bias");
  layout = make_record();
  layout.diverged = {"b"};
  EXPECT_FALSE(compare(layout).agrees());
  EXPECT_THAT(describe(compare(layout), true), HasSubstr("different copies of b"));
}

TEST(CompareRuns, HoldsGradientsAndLossesToTheirOwnTolerances) {
  constexpr Tolerances kLoose = {.scalars = 1e-4, .gradients = 1e-2, .weights = 1e-4};
  RunRecord layout = make_record();
  layout.gradients.at("a").values[0] = 1.005F;
  layout.outcomes[0].update.grad_norm = 2.01;
  EXPECT_FALSE(compare(layout).agrees());
  EXPECT_TRUE(compare(layout, kLoose).agrees());
  EXPECT_NEAR(compare(layout, kLoose).worst_gradient(), 5e-3, 1e-6);
  EXPECT_EQ(compare(layout, kLoose).worst_scalar(), 0);
  layout.outcomes[0].loss = 4.02;
  EXPECT_FALSE(compare(layout, kLoose).agrees());
  EXPECT_THAT(describe(compare(layout, kLoose), true), HasSubstr("step 1: loss 4.02"));
}

TEST(ListDiverged, NamesPartsThatAreNotTheWholes) {
  WholeTensors whole = {{"a", {{4}, {1, 2, 3, 4}}}, {"b", {{1}, {1.0F / 3}}}};
  std::vector<float> part = {3, 4};
  std::vector<Bf16> rounded = {Bf16(1.0F / 3)};
  const std::vector<NamedSlice> held = {
      {"a", view(std::span(part), {2}), Slice::of_rows({4}, {{2, 2}})},
      {"b", view(std::span(rounded), {1}), Slice::whole({1})}};
  EXPECT_THAT(list_diverged(held, whole), ElementsAre());
  part[1] = 5;
  EXPECT_THAT(list_diverged(held, whole), ElementsAre("a"));
  rounded[0] = Bf16(0.5F);
  EXPECT_THAT(list_diverged(held, whole), ElementsAre("a", "b"));
}

}  // namespace
}  // namespace tessera
