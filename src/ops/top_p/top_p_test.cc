#include "ops/top_p/top_p.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ops/top_p/top_p_testing.h"

namespace tessera {
namespace {

using testing::make_top_p_inputs;
using testing::top_p_cases;

KernelTable kernels() {
  KernelTable table;
  add_top_p_cpu(table);
  return table;
}

void check_token(const TopPSpec& spec, std::span<const double> probs,
                 std::span<const int32_t> experts, std::span<const double> kept_probs,
                 std::span<const int32_t> kept) {
  double before = 0;
  double sum = 0;
  for (size_t k = 0; k < probs.size(); ++k) {
    if (kept[k] >= 0) sum += probs[k];
  }
  for (size_t k = 0; k < probs.size(); ++k) {
    const bool keeps = k == 0 || before < spec.share;
    if (k > 0 && std::abs(before - spec.share) < 1e-6) return;  // a tie of roundings
    ASSERT_EQ(kept[k], keeps ? experts[k] : -1) << k;
    const double expected =
        keeps ? probs[k] / (spec.normalize ? sum : 1.0) * spec.scaling_factor : 0;
    ASSERT_NEAR(kept_probs[k], expected, 1e-6 * spec.scaling_factor) << k;
    before += probs[k];
  }
}

TEST(TopP, KeepsTheFewestThatReachTheShare) {
  for (const auto& c : top_p_cases()) {
    const auto inputs = make_top_p_inputs(c, 3);
    const auto out = testing::run_operator(TopP(c.spec), kernels(), inputs);
    const auto probs = testing::to_doubles(inputs[0].tensor);
    const auto experts = inputs[1].tensor.get().span<int32_t>();
    const auto kept_probs = testing::to_doubles(out[0]);
    const auto kept = out[1].get().span<int32_t>();
    std::vector<double> counts(c.spec.num_experts);
    for (int64_t token = 0; token < c.tokens; ++token) {
      const auto part = [&](auto all) { return std::span(all).subspan(token * c.top_k, c.top_k); };
      check_token(c.spec, std::span(probs).subspan(token * c.top_k, c.top_k), part(experts),
                  std::span(kept_probs).subspan(token * c.top_k, c.top_k), part(kept));
    }
    for (const int32_t expert : kept) {
      if (expert >= 0) counts[expert] += 1;
    }
    EXPECT_EQ(testing::to_doubles(out[2]), counts);
  }
}

/// Probabilities may be moved without a change of the choice: no sum is near the share.
TEST(TopP, GradientsMatchFiniteDifferences) {
  for (const bool normalize : {false, true}) {
    const TopPSpec spec{
        .num_experts = 6, .share = 0.6, .normalize = normalize, .scaling_factor = 1.5};
    const auto inputs = [] {
      return testing::list_inputs(
          testing::TestInput{
              testing::tensor_of({3, 3}, {0.7F, 0.2F, 0.1F, 0.5F, 0.3F, 0.05F, 0.3F, 0.2F, 0.15F}),
              testing::Role::kValue, "probs"},
          testing::TestInput{testing::tensor_of_i32({3, 3}, {4, 0, 1, 2, 5, 3, 1, 2, 4}),
                             testing::Role::kConstant, "expert_idx"});
    };
    const auto out = testing::run_operator(TopP(spec), kernels(), inputs());
    const auto kept = out[1].get().span<int32_t>();
    EXPECT_EQ(std::vector<int32_t>(kept.begin(), kept.end()),
              (std::vector<int32_t>{4, -1, -1, 2, 5, -1, 1, 2, 4}));
    testing::check_gradients(make_top_p(spec), kernels(), inputs(), {.outputs = {0}});
  }
}

TEST(TopP, RefusesWhatDoesNotFit) {
  EXPECT_THROW(make_top_p({.num_experts = 0}), UserError);
  EXPECT_THROW(make_top_p({.num_experts = 4, .share = 0}), UserError);
  const TopP op({.num_experts = 4, .share = 0.5});
  const ValueType probs{DType::kF32, {3, 2}};
  const ValueType idx{DType::kI32, {3, 2}};
  const auto infer = [&](const std::vector<ValueType>& types) { return op.infer(types); };
  EXPECT_EQ(infer({probs, idx}).at(2), (ValueType{DType::kF32, {4}}));
  EXPECT_THROW(infer({probs, {DType::kI32, {3, 3}}}), UserError);
  EXPECT_THROW(infer({{DType::kBF16, {3, 2}}, idx}), UserError);
}

}  // namespace
}  // namespace tessera
