#include "ops/jitter/jitter.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "ops/jitter/jitter_factors.h"
#include "ops/jitter/jitter_testing.h"

namespace tessera {
namespace {

using testing::make_jitter_inputs;
using testing::make_token_numbers;

KernelTable kernels() {
  KernelTable table;
  add_jitter_cpu(table);
  return table;
}

std::vector<double> run(const std::vector<testing::TestInput>& inputs) {
  return testing::to_doubles(testing::run_operator(Jitter(), kernels(), inputs)[0]);
}

TEST(Jitter, WordsAreThoseOfPhilox) {
  Random random(3, 0);
  for (int i = 0; i < 50; ++i) {
    const auto key = random.next_u64();
    const auto token = static_cast<int64_t>(random.next_u64() >> 1U);
    const auto group = static_cast<uint32_t>(random.next_u64());
    const auto low = static_cast<uint32_t>(key);
    const auto high = static_cast<uint32_t>(key >> 32U);
    const auto expected = philox(
        {group, static_cast<uint32_t>(token), static_cast<uint32_t>(token >> 32), 0}, {low, high});
    const PhiloxWords words = jitter_words(low, high, token, group);
    EXPECT_TRUE(std::ranges::equal(words.of, expected));
  }
}

class JitterShapes : public ::testing::TestWithParam<std::pair<int64_t, int64_t>> {};

TEST_P(JitterShapes, MultipliesByTheFactorsOfTokensAndColumns) {
  const auto [rows, width] = GetParam();
  const auto numbers = make_token_numbers(rows);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const auto inputs = make_jitter_inputs(dtype, numbers, width, 0.25F, 7);
    const auto x = testing::to_doubles(inputs[0].tensor);
    const auto y = run(inputs);
    ASSERT_EQ(x.size(), y.size());
    for (size_t i = 0; i < x.size(); ++i) {
      const auto column = static_cast<int64_t>(i) % width;
      const int64_t token = numbers[static_cast<int64_t>(i) / width];
      const auto word = philox({static_cast<uint32_t>(column / 4), static_cast<uint32_t>(token),
                                static_cast<uint32_t>(token >> 32), 0},
                               {0x12345678, static_cast<uint32_t>(-7)})[column % 4];
      const double uniform = static_cast<double>(word >> 8U) * 0x1p-24;
      const double expected = x[i] * (0.75 + 0.5 * uniform);
      EXPECT_NEAR(y[i], expected, (dtype == DType::kF32 ? 1e-6 : 4e-3) * std::abs(expected));
    }
  }
}

TEST_P(JitterShapes, GradientsMatchFiniteDifferences) {
  const auto [rows, width] = GetParam();
  testing::check_gradients(
      make_jitter(), kernels(),
      make_jitter_inputs(DType::kF32, make_token_numbers(rows), width, 0.5F, 9));
}

INSTANTIATE_TEST_SUITE_P(All, JitterShapes,
                         ::testing::Values(std::pair{0, 5}, std::pair{1, 1}, std::pair{3, 17},
                                           std::pair{5, 2}, std::pair{9, 64}));

/// A rank that has some of the tokens gives them the bits that one with all of them does.
TEST(Jitter, DependsOnTheTokensNumbersAlone) {
  const std::vector<int64_t> all = {4, 5, 6, 7, 8};
  const auto inputs = make_jitter_inputs(DType::kF32, all, 6, 0.1F, 1);
  const auto whole = run(inputs);
  auto some = make_jitter_inputs(DType::kF32, {7, 5}, 6, 0.1F, 1);
  const float* const from = inputs[0].tensor.get().as<float>();
  float* const to = some[0].tensor.get().as<float>();
  std::copy_n(from + 3 * 6, 6, to);
  std::copy_n(from + 6, 6, to + 6);
  const auto part = run(some);
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(part[i], whole[18 + i]);
    EXPECT_EQ(part[6 + i], whole[6 + i]);
  }
}

TEST(Jitter, FactorsAreUniform) {
  double sum = 0;
  double squares = 0;
  float least = 2;
  float largest = 0;
  constexpr int kGroups = 20000;
  for (int i = 0; i < kGroups; ++i) {
    const PhiloxWords words = jitter_words(1, 2, i, 0);
    for (const uint32_t word : words.of) {
      const float factor = jitter_factor(word, 0.5F);
      sum += factor;
      squares += (factor - 1.0) * (factor - 1.0);
      least = std::min(least, factor);
      largest = std::max(largest, factor);
    }
  }
  EXPECT_NEAR(sum / (4 * kGroups), 1, 5e-3);
  EXPECT_NEAR(squares / (4 * kGroups), 0.25 / 3, 1e-3);
  EXPECT_GE(least, 0.5F);
  EXPECT_LE(largest, 1.5F);
  EXPECT_LT(least, 0.501F);
  EXPECT_GT(largest, 1.499F);
}

TEST(Jitter, KeepsBitsWithoutNoise) {
  const auto inputs = make_jitter_inputs(DType::kBF16, make_token_numbers(4), 7, 0.0F, 2);
  EXPECT_EQ(run(inputs), testing::to_doubles(inputs[0].tensor));
}

TEST(Jitter, RefusesWhatDoesNotFit) {
  const ValueType x{DType::kF32, {4, 8}};
  const ValueType numbers{DType::kI64, {4}};
  const ValueType noise{DType::kI32, {kNumNoiseWords}};
  const auto infer = [](const std::vector<ValueType>& types) { return Jitter().infer(types); };
  EXPECT_EQ(infer({x, numbers, noise}).at(0), x);
  EXPECT_THROW(infer({x, {DType::kI64, {3}}, noise}), UserError);
  EXPECT_THROW(infer({x, numbers, {DType::kI32, {2}}}), UserError);
  EXPECT_THROW(infer({{DType::kI32, {4, 8}}, numbers, noise}), UserError);
  EXPECT_THROW(infer({x, numbers}), UserError);
}

}  // namespace
}  // namespace tessera
