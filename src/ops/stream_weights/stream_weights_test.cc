#include "ops/stream_weights/stream_weights.h"

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
  add_stream_weights_cpu(table);
  return table;
}

std::vector<TestInput> make_inputs(const StreamWeightsSpec& spec, int64_t tokens,
                                   double deviation = 1.0) {
  Random random(3, 0);
  return list_inputs(
      TestInput{random_tensor(DType::kF32, {tokens, spec.logits()}, random, deviation),
                Role::kValue, "logits"},
      TestInput{random_tensor(DType::kF32, {spec.scales()}, random), Role::kWeight, "scale"},
      TestInput{random_tensor(DType::kF32, {spec.logits()}, random), Role::kWeight, "base"});
}

using Matrix = std::vector<double>;

double logistic(double z) {
  return 1 / (1 + std::exp(-z));
}

/// As DeepSeek-V4 has it, by plain loops in double.
Matrix plain_comb(const StreamWeightsSpec& spec, const double* z) {
  const auto n = static_cast<size_t>(spec.streams);
  Matrix c(z, z + n * n);
  for (size_t i = 0; i < n; ++i) {
    double sum = 0;
    for (size_t j = 0; j < n; ++j) sum += std::exp(c[i * n + j]);
    for (size_t j = 0; j < n; ++j) c[i * n + j] = std::exp(c[i * n + j]) / sum + spec.eps;
  }
  const auto divide = [&](size_t line, size_t inner) {
    for (size_t a = 0; a < n; ++a) {
      double sum = spec.eps;
      for (size_t b = 0; b < n; ++b) sum += c[a * line + b * inner];
      for (size_t b = 0; b < n; ++b) c[a * line + b * inner] /= sum;
    }
  };
  divide(1, n);
  for (int64_t i = 1; i < spec.iterations; ++i) {
    divide(n, 1);
    divide(1, n);
  }
  return c;
}

class StreamWeightsSpecs : public ::testing::TestWithParam<StreamWeightsSpec> {};

TEST_P(StreamWeightsSpecs, EqualThePlainFormula) {
  const StreamWeightsSpec spec = GetParam();
  const auto n = static_cast<size_t>(spec.streams);
  for (const double deviation : {1.0, 30.0}) {
    const auto inputs = make_inputs(spec, 13, deviation);
    const auto out = testing::run_operator(StreamWeights(spec), kernels(), inputs);
    ASSERT_EQ(out.size(), spec.collapses ? 1U : 3U);
    const auto logits = testing::to_doubles(inputs[0].tensor);
    const auto scale = testing::to_doubles(inputs[1].tensor);
    const auto base = testing::to_doubles(inputs[2].tensor);
    for (size_t t = 0; t < 13; ++t) {
      std::vector<double> z;
      for (size_t m = 0; m < base.size(); ++m) {
        const size_t part = m < n ? 0 : m < 2 * n ? 1 : 2;
        z.push_back(logits[t * base.size() + m] * scale[part] + base[m]);
      }
      for (size_t j = 0; j < n; ++j)
        EXPECT_NEAR(testing::to_doubles(out[0])[t * n + j], logistic(z[j]) + spec.eps, 1e-5);
      if (spec.collapses) continue;
      const Matrix comb = plain_comb(spec, z.data() + 2 * n);
      for (size_t j = 0; j < n; ++j)
        EXPECT_NEAR(testing::to_doubles(out[1])[t * n + j], 2 * logistic(z[n + j]), 1e-5);
      for (size_t i = 0; i < n * n; ++i)
        EXPECT_NEAR(testing::to_doubles(out[2])[t * n * n + i], comb[i], 1e-4);
    }
  }
}

TEST_P(StreamWeightsSpecs, GradientsMatchFiniteDifferences) {
  for (const int64_t tokens : {0, 1, 13, 70}) {
    testing::check_gradients(make_stream_weights(GetParam()), kernels(),
                             make_inputs(GetParam(), tokens), {.step = 3e-3});
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, StreamWeightsSpecs,
    ::testing::Values(StreamWeightsSpec{.streams = 4}, StreamWeightsSpec{.streams = 2},
                      StreamWeightsSpec{.streams = 3, .iterations = 1, .eps = 0.1},
                      StreamWeightsSpec{.streams = 8, .iterations = 5},
                      StreamWeightsSpec{.streams = 1, .iterations = 3},
                      StreamWeightsSpec{.streams = 4, .collapses = true}));

TEST(StreamWeights, MixesByADoublyStochasticMatrix) {
  const StreamWeightsSpec spec{.streams = 4, .iterations = 20};
  const auto out = testing::run_operator(StreamWeights(spec), kernels(), make_inputs(spec, 50));
  const float* comb = out[StreamWeights::kComb].get().as<float>();
  for (int64_t t = 0; t < 50; ++t, comb += 16) {
    for (int i = 0; i < 4; ++i) {
      float row = 0;
      float column = 0;
      for (int j = 0; j < 4; ++j) {
        row += comb[i * 4 + j];
        column += comb[j * 4 + i];
      }
      EXPECT_NEAR(row, 1, 0.02);
      EXPECT_NEAR(column, 1, 1e-4);
    }
  }
}

TEST(StreamWeights, RefusesWhatCannotBe) {
  EXPECT_THROW(StreamWeights({.streams = 9}), UserError);
  EXPECT_THROW(StreamWeights({.streams = 2, .iterations = 0}), UserError);
  EXPECT_THROW(StreamWeights({.streams = 2, .iterations = 65}), UserError);
  EXPECT_THROW(StreamWeights({.streams = 2, .eps = -1}), UserError);
  const StreamWeights op({.streams = 2});
  EXPECT_THROW(op.infer(std::vector<ValueType>{
                   {DType::kF32, {4, 7}}, {DType::kF32, {3}}, {DType::kF32, {8}}}),
               UserError);
}

}  // namespace
}  // namespace tessera
