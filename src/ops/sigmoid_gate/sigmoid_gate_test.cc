#include "ops/sigmoid_gate/sigmoid_gate.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "ops/testing/op_test.h"

namespace tessera {
namespace {

using testing::random_tensor;
using testing::Role;
using testing::TestInput;

KernelTable kernels() {
  KernelTable table;
  add_sigmoid_gate_cpu(table);
  return table;
}

std::vector<TestInput> make_inputs(DType dtype, int64_t rows, int64_t width, uint64_t seed) {
  Random random(seed, 0);
  std::vector<TestInput> inputs;
  inputs.push_back({random_tensor(dtype, {rows, width}, random), Role::kValue, "y"});
  inputs.push_back({random_tensor(dtype, {rows, 1}, random), Role::kValue, "logit"});
  return inputs;
}

class SigmoidGateShapes : public ::testing::TestWithParam<std::pair<int64_t, int64_t>> {};

TEST_P(SigmoidGateShapes, EqualsThePlainFormula) {
  const auto [rows, width] = GetParam();
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const auto inputs = make_inputs(dtype, rows, width, 7);
    const auto out = testing::run_operator(SigmoidGate(), kernels(), inputs);
    const auto y = testing::to_doubles(inputs[0].tensor);
    const auto logit = testing::to_doubles(inputs[1].tensor);
    const auto actual = testing::to_doubles(out[0]);
    ASSERT_EQ(actual.size(), y.size());
    for (size_t i = 0; i < y.size(); ++i) {
      const double expected = y[i] / (1 + std::exp(-logit[i / static_cast<size_t>(width)]));
      EXPECT_NEAR(actual[i], expected,
                  (dtype == DType::kF32 ? 1e-6 : 4e-3) * (1 + std::abs(expected)));
    }
  }
}

TEST_P(SigmoidGateShapes, GradientsMatchFiniteDifferences) {
  const auto [rows, width] = GetParam();
  testing::check_gradients(make_sigmoid_gate(), kernels(),
                           make_inputs(DType::kF32, rows, width, 11));
}

INSTANTIATE_TEST_SUITE_P(All, SigmoidGateShapes,
                         ::testing::Values(std::pair{0, 5}, std::pair{1, 1}, std::pair{3, 17},
                                           std::pair{9, 64}));

TEST_P(SigmoidGateShapes, GatesElements) {
  const auto [rows, width] = GetParam();
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    auto inputs = make_inputs(dtype, rows, width, 7);
    Random random(8, 0);
    inputs[1].tensor = random_tensor(dtype, {rows, width}, random);
    const auto out = testing::run_operator(SigmoidGate(), kernels(), inputs);
    const auto y = testing::to_doubles(inputs[0].tensor);
    const auto logit = testing::to_doubles(inputs[1].tensor);
    const auto actual = testing::to_doubles(out[0]);
    for (size_t i = 0; i < y.size(); ++i) {
      const double expected = y[i] / (1 + std::exp(-logit[i]));
      EXPECT_NEAR(actual[i], expected,
                  (dtype == DType::kF32 ? 1e-6 : 4e-3) * (1 + std::abs(expected)));
    }
    if (dtype == DType::kF32) testing::check_gradients(make_sigmoid_gate(), kernels(), inputs);
  }
}

/// Heads of one element, of several, and one of all elements.
TEST(SigmoidGate, GatesHeads) {
  for (const GateFunction function : {GateFunction::kSigmoid, GateFunction::kSoftplus}) {
    for (const auto& [rows, heads, size] :
         {std::array<int64_t, 3>{0, 2, 3}, {3, 4, 5}, {2, 1, 7}, {4, 3, 1}, {5, 2, 64}}) {
      const GateSpec spec{.function = function, .of_heads = true};
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        auto inputs = make_inputs(dtype, rows, heads * size, 7);
        Random random(8, 0);
        inputs[1].tensor = random_tensor(dtype, {rows, heads}, random);
        const auto out = testing::run_operator(SigmoidGate(spec), kernels(), inputs);
        const auto y = testing::to_doubles(inputs[0].tensor);
        const auto logit = testing::to_doubles(inputs[1].tensor);
        const auto actual = testing::to_doubles(out[0]);
        for (size_t i = 0; i < y.size(); ++i) {
          const double x = logit[i / static_cast<size_t>(size)];
          const double gate = function == GateFunction::kSoftplus ? std::log1p(std::exp(x))
                                                                  : 1 / (1 + std::exp(-x));
          EXPECT_NEAR(actual[i], y[i] * gate,
                      (dtype == DType::kF32 ? 1e-6 : 4e-3) * (1 + std::abs(y[i] * gate)));
        }
        if (dtype == DType::kF32)
          testing::check_gradients(make_sigmoid_gate(spec), kernels(), inputs);
      }
    }
  }
}

/// A factor of each row, in F32 whatever the rows are in.
TEST(SigmoidGate, MultipliesRowsByFactors) {
  const GateSpec spec{.function = GateFunction::kIdentity};
  for (const auto& [rows, width] :
       {std::pair<int64_t, int64_t>{0, 5}, {1, 1}, {3, 17}, {9, 64}, {4, 1}}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      auto inputs = make_inputs(dtype, rows, width, 7);
      Random random(8, 0);
      inputs[1].tensor = random_tensor(DType::kF32, {rows}, random);
      const auto out = testing::run_operator(SigmoidGate(spec), kernels(), inputs);
      const auto y = testing::to_doubles(inputs[0].tensor);
      const float* factors = inputs[1].tensor.get().as<float>();
      std::vector<float> expected;
      for (size_t i = 0; i < y.size(); ++i)
        expected.push_back(static_cast<float>(y[i]) * factors[i / static_cast<size_t>(width)]);
      testing::expect_bitwise_equal(out[0], testing::tensor_of({rows, width}, expected, dtype),
                                    "y");
      if (dtype == DType::kF32)
        testing::check_gradients(make_sigmoid_gate(spec), kernels(), inputs);
    }
  }
  const std::vector<ValueType> types = {{DType::kBF16, {4, 8}}, {DType::kBF16, {4}}};
  EXPECT_THROW(SigmoidGate(spec).infer(types), UserError);
}

TEST(SigmoidGate, RefusesALogitOfAnotherShape) {
  const std::vector<ValueType> types = {{DType::kF32, {4, 8}}, {DType::kF32, {3, 1}}};
  EXPECT_THROW(SigmoidGate().infer(types), UserError);
  const std::vector<ValueType> heads = {{DType::kF32, {4, 8}}, {DType::kF32, {4, 3}}};
  EXPECT_THROW(SigmoidGate().infer(heads), UserError);
}

}  // namespace
}  // namespace tessera
