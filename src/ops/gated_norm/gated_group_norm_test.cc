#include "ops/gated_norm/gated_group_norm.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ops/testing/op_test.h"

namespace tessera {
namespace {

using testing::list_inputs;
using testing::random_tensor;
using testing::Role;
using testing::TestInput;

struct GroupCase {
  int64_t tokens = 1;
  int64_t groups = 1;
  int64_t size = 1;
};

KernelTable group_kernels() {
  KernelTable table;
  add_gated_group_norm_cpu(table);
  return table;
}

std::vector<TestInput> make_group_inputs(DType dtype, const GroupCase& c) {
  Random random(3, 0);
  const int64_t width = c.groups * c.size;
  return list_inputs(TestInput{random_tensor(dtype, {c.tokens, width}, random), Role::kValue, "x"},
                     TestInput{random_tensor(dtype, {c.tokens, width}, random), Role::kValue, "z"},
                     TestInput{random_tensor(DType::kF32, {width}, random), Role::kWeight, "w"});
}

class GatedGroupNormCases : public ::testing::TestWithParam<GroupCase> {};

TEST_P(GatedGroupNormCases, EqualsThePlainFormula) {
  const GroupCase c = GetParam();
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const auto inputs = make_group_inputs(dtype, c);
    const auto out =
        testing::run_operator(GatedGroupNorm({c.groups, 1e-6}), group_kernels(), inputs);
    const auto x = testing::to_doubles(inputs[0].tensor);
    const auto z = testing::to_doubles(inputs[1].tensor);
    const auto w = testing::to_doubles(inputs[2].tensor);
    const auto y = testing::to_doubles(out[0]);
    for (int64_t row = 0; row < c.tokens * c.groups; ++row) {
      const auto gated = [&](int64_t at) { return x[at] * z[at] / (1 + std::exp(-z[at])); };
      double squares = 0;
      for (int64_t i = 0; i < c.size; ++i) squares += std::pow(gated(row * c.size + i), 2);
      const double rstd = 1 / std::sqrt(squares / static_cast<double>(c.size) + 1e-6);
      for (int64_t i = 0; i < c.size; ++i) {
        const int64_t at = row * c.size + i;
        const double expected = gated(at) * rstd * w[row % c.groups * c.size + i];
        EXPECT_NEAR(y[at], expected,
                    (dtype == DType::kF32 ? 2e-6 : 4e-3) * (1 + std::abs(expected)));
      }
    }
  }
}

TEST_P(GatedGroupNormCases, GradientsMatchFiniteDifferences) {
  const GroupCase c = GetParam();
  testing::check_gradients(make_gated_group_norm({c.groups, 1e-2}), group_kernels(),
                           make_group_inputs(DType::kF32, c));
}

INSTANTIATE_TEST_SUITE_P(All, GatedGroupNormCases,
                         ::testing::Values(GroupCase{0, 2, 4}, GroupCase{1, 1, 5},
                                           GroupCase{9, 3, 17}, GroupCase{33, 2, 64}));

TEST(GatedGroupNorm, RefusesGroupsThatDoNotDivide) {
  const ValueType x{DType::kF32, {4, 8}};
  const std::vector<ValueType> inputs = {x, x, {DType::kF32, {8}}};
  EXPECT_THROW(GatedGroupNorm({3, 1e-6}).infer(inputs), UserError);
  EXPECT_THROW(GatedGroupNorm({0, 1e-6}), UserError);
}

}  // namespace
}  // namespace tessera
