#include "ops/mix_streams/mix_streams.h"

#include <gtest/gtest.h>

#include "ops/testing/op_test.h"

namespace tessera {
namespace {

using testing::list_inputs;
using testing::random_tensor;
using testing::Role;
using testing::TestInput;

KernelTable kernels() {
  KernelTable table;
  add_mix_streams_cpu(table);
  return table;
}

struct StreamCase {
  int64_t tokens;
  int64_t streams;
  int64_t hidden;
};

std::vector<TestInput> make_inputs(DType dtype, const StreamCase& c) {
  Random random(3, 0);
  const int64_t n = c.streams;
  return list_inputs(
      TestInput{random_tensor(dtype, {c.tokens, n * c.hidden}, random), Role::kValue, "x"},
      TestInput{random_tensor(dtype, {c.tokens, c.hidden}, random), Role::kValue, "given"},
      TestInput{random_tensor(DType::kF32, {c.tokens, n}, random), Role::kValue, "post"},
      TestInput{random_tensor(DType::kF32, {c.tokens, n * n}, random), Role::kValue, "comb"});
}

class MixStreamsShapes : public ::testing::TestWithParam<StreamCase> {};

TEST_P(MixStreamsShapes, EqualThePlainFormula) {
  const StreamCase c = GetParam();
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const auto inputs = make_inputs(dtype, c);
    const auto out = testing::run_operator(MixStreams(), kernels(), inputs);
    std::vector<std::vector<double>> in;
    for (const TestInput& input : inputs) in.push_back(testing::to_doubles(input.tensor));
    std::vector<float> expected;
    for (int64_t t = 0; t < c.tokens; ++t) {
      for (int64_t k = 0; k < c.streams; ++k) {
        for (int64_t h = 0; h < c.hidden; ++h) {
          double sum = in[2][t * c.streams + k] * in[1][t * c.hidden + h];
          for (int64_t j = 0; j < c.streams; ++j) {
            sum += in[3][(t * c.streams + j) * c.streams + k] *
                   in[0][(t * c.streams + j) * c.hidden + h];
          }
          expected.push_back(static_cast<float>(sum));
        }
      }
    }
    testing::expect_rows_near(out[0],
                              testing::tensor_of({c.tokens, c.streams * c.hidden}, expected),
                              dtype == DType::kF32 ? 1e-6 : 5e-3, "y");
  }
}

TEST_P(MixStreamsShapes, GradientsMatchFiniteDifferences) {
  testing::check_gradients(make_mix_streams(), kernels(), make_inputs(DType::kF32, GetParam()));
}

INSTANTIATE_TEST_SUITE_P(All, MixStreamsShapes,
                         ::testing::Values(StreamCase{0, 2, 4}, StreamCase{1, 1, 1},
                                           StreamCase{7, 4, 20}, StreamCase{5, 3, 37},
                                           StreamCase{33, 8, 16}));

TEST(MixStreams, RefusesWhatDoesNotFit) {
  const auto infer = [](int64_t streams, int64_t width, int64_t pairs) {
    MixStreams().infer(std::vector<ValueType>{{DType::kF32, {4, streams * 6}},
                                              {DType::kF32, {4, width}},
                                              {DType::kF32, {4, streams}},
                                              {DType::kF32, {4, pairs}}});
  };
  EXPECT_NO_THROW(infer(2, 6, 4));
  EXPECT_THROW(infer(2, 5, 4), UserError);
  EXPECT_THROW(infer(2, 6, 2), UserError);
  EXPECT_THROW(infer(9, 6, 81), UserError) << "too many streams";
}

}  // namespace
}  // namespace tessera
