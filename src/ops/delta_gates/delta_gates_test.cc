#include "ops/delta_gates/delta_gates.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ops/testing/op_test.h"

namespace tessera {
namespace {

using testing::list_inputs;
using testing::random_tensor;
using testing::Role;
using testing::TestInput;

KernelTable kernels() {
  KernelTable table;
  add_delta_gates_cpu(table);
  return table;
}

std::vector<TestInput> make_inputs(DType dtype, int64_t tokens, int64_t heads, double deviation) {
  Random random(3, 0);
  return list_inputs(
      TestInput{random_tensor(dtype, {tokens, heads}, random, deviation), Role::kValue, "a"},
      TestInput{random_tensor(dtype, {tokens, heads}, random), Role::kValue, "b"},
      TestInput{random_tensor(DType::kF32, {heads}, random), Role::kWeight, "A_log"},
      TestInput{random_tensor(DType::kF32, {heads}, random), Role::kWeight, "dt_bias"});
}

class DeltaGatesShapes : public ::testing::TestWithParam<std::pair<int64_t, int64_t>> {};

TEST_P(DeltaGatesShapes, EqualThePlainFormula) {
  const auto [tokens, heads] = GetParam();
  // The large ones would overflow in a plain exponential.
  for (const double deviation : {1.0, 200.0}) {
    const auto inputs = make_inputs(DType::kF32, tokens, heads, deviation);
    const auto out = testing::run_operator(DeltaGates(), kernels(), inputs);
    const auto a = testing::to_doubles(inputs[0].tensor);
    const auto b = testing::to_doubles(inputs[1].tensor);
    const auto rate = testing::to_doubles(inputs[2].tensor);
    const auto bias = testing::to_doubles(inputs[3].tensor);
    const auto g = testing::to_doubles(out[0]);
    const auto beta = testing::to_doubles(out[1]);
    for (size_t i = 0; i < a.size(); ++i) {
      const size_t n = i % static_cast<size_t>(heads);
      const double step = a[i] + bias[n];
      const double expected = -std::exp(rate[n]) * (step > 30 ? step : std::log1p(std::exp(step)));
      EXPECT_NEAR(g[i], expected, 2e-6 * (1 + std::abs(expected)));
      EXPECT_NEAR(beta[i], 1 / (1 + std::exp(-b[i])), 1e-6);
    }
  }
}

TEST_P(DeltaGatesShapes, GradientsMatchFiniteDifferences) {
  const auto [tokens, heads] = GetParam();
  testing::check_gradients(make_delta_gates(), kernels(),
                           make_inputs(DType::kF32, tokens, heads, 1.0));
}

INSTANTIATE_TEST_SUITE_P(All, DeltaGatesShapes,
                         ::testing::Values(std::pair{0, 3}, std::pair{1, 1}, std::pair{7, 5},
                                           std::pair{40, 16}));

TEST(DeltaGates, RefusesAnotherNumberOfHeads) {
  const ValueType a{DType::kF32, {4, 8}};
  EXPECT_THROW(
      DeltaGates().infer(std::vector<ValueType>{a, a, {DType::kF32, {8}}, {DType::kF32, {7}}}),
      UserError);
}

}  // namespace
}  // namespace tessera
