#include "ops/gated_norm/gated_norm.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ops/testing/op_test.h"

namespace tessera {
namespace {

using testing::list_inputs;
using testing::random_tensor;
using testing::Role;
using testing::TestInput;

struct GatedCase {
  int64_t tokens = 1;
  int64_t heads = 1;
  int64_t size = 1;
  NormGate gate = NormGate::kSilu;
};

KernelTable kernels() {
  KernelTable table;
  add_gated_norm_cpu(table);
  return table;
}

std::vector<TestInput> make_inputs(DType dtype, const GatedCase& c) {
  Random random(3, 0);
  const Shape shape = {c.tokens, c.heads * c.size};
  return list_inputs(TestInput{random_tensor(dtype, shape, random), Role::kValue, "x"},
                     TestInput{random_tensor(dtype, shape, random), Role::kValue, "z"},
                     TestInput{random_tensor(DType::kF32, {c.size}, random), Role::kWeight, "w"});
}

class GatedNormCases : public ::testing::TestWithParam<GatedCase> {};

TEST_P(GatedNormCases, EqualsThePlainFormula) {
  const GatedCase c = GetParam();
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const auto inputs = make_inputs(dtype, c);
    const auto out = testing::run_operator(GatedNorm(1e-6, c.gate), kernels(), inputs);
    const auto x = testing::to_doubles(inputs[0].tensor);
    const auto z = testing::to_doubles(inputs[1].tensor);
    const auto w = testing::to_doubles(inputs[2].tensor);
    const auto y = testing::to_doubles(out[0]);
    for (int64_t row = 0; row < c.tokens * c.heads; ++row) {
      double squares = 0;
      for (int64_t i = 0; i < c.size; ++i) squares += std::pow(x[row * c.size + i], 2);
      const double rstd = 1 / std::sqrt(squares / static_cast<double>(c.size) + 1e-6);
      for (int64_t i = 0; i < c.size; ++i) {
        const int64_t at = row * c.size + i;
        const double factor = c.gate == NormGate::kSilu ? z[at] : 1;
        const double expected = x[at] * rstd * w[i] * factor / (1 + std::exp(-z[at]));
        EXPECT_NEAR(y[at], expected,
                    (dtype == DType::kF32 ? 2e-6 : 4e-3) * (1 + std::abs(expected)));
      }
    }
  }
}

TEST_P(GatedNormCases, GradientsMatchFiniteDifferences) {
  testing::check_gradients(make_gated_norm(1e-2, GetParam().gate), kernels(),
                           make_inputs(DType::kF32, GetParam()));
}

INSTANTIATE_TEST_SUITE_P(All, GatedNormCases,
                         ::testing::Values(GatedCase{0, 2, 4}, GatedCase{1, 1, 5},
                                           GatedCase{9, 3, 17}, GatedCase{33, 2, 64},
                                           GatedCase{9, 3, 17, NormGate::kSigmoid}));

TEST(GatedNorm, RefusesAWeightThatIsNoHeads) {
  const ValueType x{DType::kF32, {4, 8}};
  EXPECT_THROW(GatedNorm(1e-6).infer(std::vector<ValueType>{x, x, {DType::kF32, {3}}}), UserError);
}

}  // namespace
}  // namespace tessera
