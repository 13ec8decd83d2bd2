#include "ops/collapse_streams/collapse_streams.h"

#include <gtest/gtest.h>

#include "ops/testing/addend_check.h"

namespace tessera {
namespace {

using testing::list_inputs;
using testing::random_tensor;
using testing::Role;
using testing::TestInput;

KernelTable kernels() {
  KernelTable table;
  add_collapse_streams_cpu(table);
  return table;
}

struct StreamCase {
  int64_t tokens;
  int64_t streams;
  int64_t hidden;
};

std::vector<TestInput> make_inputs(DType dtype, const StreamCase& c) {
  Random random(3, 0);
  return list_inputs(
      TestInput{random_tensor(dtype, {c.tokens, c.streams * c.hidden}, random), Role::kValue, "x"},
      TestInput{random_tensor(DType::kF32, {c.tokens, c.streams}, random), Role::kValue, "pre"});
}

class CollapseStreamsShapes : public ::testing::TestWithParam<StreamCase> {};

TEST_P(CollapseStreamsShapes, EqualThePlainFormula) {
  const StreamCase c = GetParam();
  const auto inputs = make_inputs(DType::kF32, c);
  const auto out = testing::run_operator(CollapseStreams(), kernels(), inputs);
  const auto x = testing::to_doubles(inputs[0].tensor);
  const auto pre = testing::to_doubles(inputs[1].tensor);
  const auto y = testing::to_doubles(out[0]);
  for (int64_t i = 0; i < std::ssize(y); ++i) {
    const int64_t token = i / c.hidden;
    double sum = 0;
    for (int64_t j = 0; j < c.streams; ++j) {
      sum += pre[token * c.streams + j] * x[(token * c.streams + j) * c.hidden + i % c.hidden];
    }
    EXPECT_NEAR(y[i], sum, 1e-5);
  }
}

TEST_P(CollapseStreamsShapes, GradientsMatchFiniteDifferences) {
  testing::check_gradients(make_collapse_streams(), kernels(),
                           make_inputs(DType::kF32, GetParam()));
}

INSTANTIATE_TEST_SUITE_P(All, CollapseStreamsShapes,
                         ::testing::Values(StreamCase{0, 2, 4}, StreamCase{1, 1, 1},
                                           StreamCase{7, 4, 20}, StreamCase{5, 3, 37},
                                           StreamCase{33, 8, 16}));

TEST(CollapseStreams, BackwardTakesAnAddend) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    auto inputs = make_inputs(dtype, {9, 4, 24});
    Random random(5, 0);
    inputs.push_back({random_tensor(dtype, {9, 24}, random), Role::kValue, "grad"});
    testing::check_addend(CollapseStreamsBackward(), kernels(), std::move(inputs));
  }
}

TEST(CollapseStreams, RefusesWhatDoesNotFit) {
  const CollapseStreams op;
  EXPECT_THROW(op.infer(std::vector<ValueType>{{DType::kF32, {4, 9}}, {DType::kF32, {4, 2}}}),
               UserError);
  EXPECT_THROW(op.infer(std::vector<ValueType>{{DType::kF32, {4, 8}}, {DType::kF32, {3, 2}}}),
               UserError);
}

}  // namespace
}  // namespace tessera
