#include "ops/sinkhorn/sinkhorn.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>

#include "ops/sinkhorn/sinkhorn_testing.h"

namespace tessera {
namespace {

using testing::make_sinkhorn_inputs;

KernelTable kernels() {
  KernelTable table;
  add_sinkhorn_cpu(table);
  return table;
}

std::vector<int32_t> run(const SinkhornSpec& spec, const std::vector<testing::TestInput>& inputs) {
  const auto out = testing::run_operator(Sinkhorn(spec), kernels(), inputs);
  const auto span = out[0].get().span<int32_t>();
  return {span.begin(), span.end()};
}

/// exp(logits) with rows that sum to 1 / T and columns that sum to 1 / E, plainly: until nothing
/// changes any more.
std::vector<double> even_out(const std::vector<double>& logits, int64_t tokens, int64_t experts) {
  std::vector<double> p(logits.size());
  std::ranges::transform(logits, p.begin(), [](double logit) { return std::exp(logit); });
  const auto scale = [&](int64_t lines, int64_t length, int64_t line_step, int64_t step) {
    for (int64_t line = 0; line < lines; ++line) {
      double sum = 0;
      for (int64_t i = 0; i < length; ++i) sum += p[line * line_step + i * step];
      for (int64_t i = 0; i < length; ++i)
        p[line * line_step + i * step] /= sum * static_cast<double>(lines);
    }
  };
  for (int step = 0; step < 300; ++step) {
    scale(tokens, experts, experts, 1);
    scale(experts, tokens, 1, experts);
  }
  return p;
}

struct Sizes {
  int64_t tokens, experts, top_k;
};
constexpr Sizes kSizes[] = {{0, 4, 2}, {1, 1, 1}, {5, 3, 2}, {70, 8, 2}, {33, 7, 7}, {300, 40, 4}};

/// An expert that is chosen before another one has no less in the matrix, as far as the iteration
/// goes, and all that are chosen have no less than those that are not.
TEST(Sinkhorn, ChoosesTheLargestOfTheEvenedOutMatrix) {
  for (const auto& [tokens, experts, top_k] : kSizes) {
    const auto inputs = make_sinkhorn_inputs(tokens, experts, 3);
    const auto idx = run({.top_k = top_k, .tokens = {0, tokens}}, inputs);
    const auto p = even_out(testing::to_doubles(inputs[0].tensor), tokens, experts);
    for (int64_t t = 0; t < tokens; ++t) {
      const auto chosen = std::span(idx).subspan(t * top_k, top_k);
      const std::set<int32_t> distinct(chosen.begin(), chosen.end());
      ASSERT_EQ(std::ssize(distinct), top_k);
      const double* const row = p.data() + t * experts;
      for (int64_t k = 0; k < top_k; ++k) {
        for (int32_t e = 0; e < experts; ++e) {
          const auto end = chosen.begin() + k;
          if (std::find(chosen.begin(), end, e) != end) continue;
          ASSERT_GE(row[chosen[k]], row[e] * (1 - 1e-2)) << tokens << " " << t << " " << k;
        }
      }
    }
  }
}

TEST(Sinkhorn, EvensLoadsOut) {
  constexpr int64_t kTokens = 600;
  constexpr int64_t kExperts = 6;
  const auto inputs = make_sinkhorn_inputs(kTokens, kExperts, 4);
  const auto logits = testing::to_doubles(inputs[0].tensor);
  std::vector<int> before(kExperts);
  std::vector<int> after(kExperts);
  for (int64_t t = 0; t < kTokens; ++t) {
    const auto row = std::span(logits).subspan(t * kExperts, kExperts);
    ++before[std::ranges::max_element(row) - row.begin()];
  }
  for (const int32_t e : run({.top_k = 1, .tokens = {0, kTokens}}, inputs)) ++after[e];
  EXPECT_GT(std::ranges::max(before), 2 * kTokens / kExperts);
  EXPECT_LT(std::ranges::max(after), 1.3 * kTokens / kExperts);
  EXPECT_GT(std::ranges::min(after), 0.7 * kTokens / kExperts);
}

TEST(Sinkhorn, ARankHasItsPartOfTheChoice) {
  const auto inputs = make_sinkhorn_inputs(40, 5, 5);
  const auto all = run({.top_k = 2, .tokens = {0, 40}}, inputs);
  const auto part = run({.top_k = 2, .tokens = {10, 20}}, inputs);
  EXPECT_EQ(part, std::vector<int32_t>(all.begin() + 20, all.begin() + 60));
}

TEST(Sinkhorn, LeavesEvaluationsToTheRouter) {
  const auto idx = run({.top_k = 2, .tokens = {0, 9}}, make_sinkhorn_inputs(9, 4, 6, false));
  EXPECT_EQ(idx, std::vector<int32_t>(18, -1));
}

TEST(Sinkhorn, IndicesAreValidWhateverTheLogits) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const float bad : {kInf, -kInf, kNan, 3e38F}) {
    auto inputs = make_sinkhorn_inputs(12, 4, 7);
    for (float& logit : inputs[0].tensor.get().span<float>().subspan(8, 6)) logit = bad;
    const auto idx = run({.top_k = 3, .tokens = {0, 12}}, inputs);
    for (size_t t = 0; t < 12; ++t) {
      const std::set<int32_t> distinct(idx.begin() + 3 * t, idx.begin() + 3 * t + 3);
      EXPECT_EQ(distinct.size(), 3U);
      EXPECT_GE(*distinct.begin(), 0);
      EXPECT_LT(*distinct.rbegin(), 4);
    }
  }
}

TEST(Sinkhorn, RefusesWhatDoesNotFit) {
  EXPECT_THROW(make_sinkhorn({.top_k = 0}), UserError);
  const ValueType logits{DType::kF32, {6, 4}};
  const ValueType noise{DType::kI32, {kNumNoiseWords}};
  const auto infer = [](const SinkhornSpec& spec, const std::vector<ValueType>& types) {
    return Sinkhorn(spec).infer(types);
  };
  EXPECT_EQ(infer({.top_k = 2, .tokens = {2, 3}}, {logits, noise}).at(0),
            (ValueType{DType::kI32, {3, 2}}));
  EXPECT_THROW(infer({.top_k = 5, .tokens = {0, 6}}, {logits, noise}), UserError);
  EXPECT_THROW(infer({.top_k = 2, .tokens = {4, 3}}, {logits, noise}), UserError);
  EXPECT_THROW(infer({.top_k = 2, .tokens = {0, 6}}, {{DType::kBF16, {6, 4}}, noise}), UserError);
  EXPECT_THROW(infer({.top_k = 2, .tokens = {0, 6}}, {logits}), UserError);
}

}  // namespace
}  // namespace tessera
