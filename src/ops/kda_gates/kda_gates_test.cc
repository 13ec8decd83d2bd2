#include "ops/kda_gates/kda_gates.h"

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
  add_kda_gates_cpu(table);
  return table;
}

struct GateCase {
  int64_t tokens;
  int64_t heads;
  int64_t size;
};

std::vector<TestInput> make_inputs(DType dtype, const GateCase& c, double deviation) {
  Random random(3, 0);
  const int64_t width = c.heads * c.size;
  return list_inputs(
      TestInput{random_tensor(dtype, {c.tokens, width}, random, deviation), Role::kValue, "a"},
      TestInput{random_tensor(dtype, {c.tokens, c.heads}, random), Role::kValue, "b"},
      TestInput{random_tensor(DType::kF32, {c.heads}, random), Role::kWeight, "A_log"},
      TestInput{random_tensor(DType::kF32, {width}, random), Role::kWeight, "dt_bias"});
}

class KdaGatesShapes : public ::testing::TestWithParam<GateCase> {};

TEST_P(KdaGatesShapes, EqualThePlainFormula) {
  const GateCase c = GetParam();
  // The large ones would overflow in a plain exponential.
  for (const double deviation : {1.0, 200.0}) {
    const auto inputs = make_inputs(DType::kF32, c, deviation);
    const auto out = testing::run_operator(KdaGates(), kernels(), inputs);
    std::vector<std::vector<double>> in;
    for (const TestInput& input : inputs) in.push_back(testing::to_doubles(input.tensor));
    const auto g = testing::to_doubles(out[0]);
    for (size_t i = 0; i < g.size(); ++i) {
      const size_t column = i % static_cast<size_t>(c.heads * c.size);
      const double step = in[0][i] + in[3][column];
      const double rate = -std::exp(in[2][column / static_cast<size_t>(c.size)]);
      const double expected = rate * (step > 40 ? step : std::log1p(std::exp(step)));
      // The sum a + dt_bias is rounded, by which small exponentials differ.
      EXPECT_NEAR(g[i], expected, (1e-6 + 1e-7 * std::abs(step)) * std::abs(expected) + 1e-30);
    }
    const auto beta = testing::to_doubles(out[1]);
    for (size_t i = 0; i < beta.size(); ++i)
      EXPECT_NEAR(beta[i], 1 / (1 + std::exp(-in[1][i])), 1e-6);
  }
}

TEST_P(KdaGatesShapes, GradientsMatchFiniteDifferences) {
  testing::check_gradients(make_kda_gates(), kernels(), make_inputs(DType::kF32, GetParam(), 1.0));
}

INSTANTIATE_TEST_SUITE_P(All, KdaGatesShapes,
                         ::testing::Values(GateCase{0, 3, 4}, GateCase{1, 1, 1}, GateCase{7, 5, 3},
                                           GateCase{40, 2, 16}, GateCase{3, 2, 37}));

TEST(KdaGates, RefusesWhatDoesNotFit) {
  const auto infer = [](int64_t width, int64_t biases) {
    KdaGates().infer(std::vector<ValueType>{{DType::kF32, {4, width}},
                                            {DType::kF32, {4, 2}},
                                            {DType::kF32, {2}},
                                            {DType::kF32, {biases}}});
  };
  EXPECT_NO_THROW(infer(8, 8));
  EXPECT_THROW(infer(7, 7), UserError) << "no multiple of the heads";
  EXPECT_THROW(infer(8, 2), UserError) << "a bias of each head";
}

}  // namespace
}  // namespace tessera
