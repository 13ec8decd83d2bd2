#include "ops/stream_logits/stream_logits.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ops/testing/addend_check.h"

namespace tessera {
namespace {

using testing::list_inputs;
using testing::random_tensor;
using testing::Role;
using testing::TestInput;

constexpr double kEps = 1e-3;

KernelTable kernels() {
  KernelTable table;
  add_stream_logits_cpu(table);
  return table;
}

struct LogitCase {
  int64_t tokens;
  int64_t width;
  int64_t logits;
};

std::vector<TestInput> make_inputs(DType dtype, const LogitCase& c) {
  Random random(3, 0);
  return list_inputs(
      TestInput{random_tensor(dtype, {c.tokens, c.width}, random), Role::kValue, "x"},
      TestInput{random_tensor(DType::kF32, {c.logits, c.width}, random, 0.3), Role::kWeight, "w"});
}

class StreamLogitsShapes : public ::testing::TestWithParam<LogitCase> {};

TEST_P(StreamLogitsShapes, EqualThePlainFormula) {
  const LogitCase c = GetParam();
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const auto inputs = make_inputs(dtype, c);
    const auto out = testing::run_operator(StreamLogits(kEps), kernels(), inputs);
    const auto x = testing::to_doubles(inputs[0].tensor);
    const auto w = testing::to_doubles(inputs[1].tensor);
    const auto logits = testing::to_doubles(out[0]);
    const auto rstd = testing::to_doubles(out[1]);
    for (int64_t t = 0; t < c.tokens; ++t) {
      double squares = 0;
      for (int64_t i = 0; i < c.width; ++i) squares += x[t * c.width + i] * x[t * c.width + i];
      const double factor = 1 / std::sqrt(squares / static_cast<double>(c.width) + kEps);
      EXPECT_NEAR(rstd[t], factor, 1e-5 * factor);
      for (int64_t m = 0; m < c.logits; ++m) {
        double sum = 0;
        for (int64_t i = 0; i < c.width; ++i) sum += x[t * c.width + i] * w[m * c.width + i];
        EXPECT_NEAR(logits[t * c.logits + m], factor * sum, 1e-5 * (1 + std::abs(factor * sum)));
      }
    }
  }
}

TEST_P(StreamLogitsShapes, GradientsMatchFiniteDifferences) {
  testing::check_gradients(make_stream_logits(kEps), kernels(),
                           make_inputs(DType::kF32, GetParam()),
                           {.outputs = {StreamLogits::kLogits}});
}

INSTANTIATE_TEST_SUITE_P(All, StreamLogitsShapes,
                         ::testing::Values(LogitCase{0, 8, 3}, LogitCase{1, 1, 1},
                                           LogitCase{7, 20, 8}, LogitCase{5, 130, 24},
                                           LogitCase{66, 48, 15}));

/// What generation needs: texts beside a text do not change its bits.
TEST(StreamLogits, ATokenDoesNotDependOnOthers) {
  const auto all = make_inputs(DType::kF32, {9, 50, 8});
  const auto whole = testing::run_operator(StreamLogits(kEps), kernels(), all);
  for (const int64_t first : {0, 4, 7, 8}) {
    Random random(3, 0);
    auto some = make_inputs(DType::kF32, {9 - first, 50, 8});
    std::copy_n(all[0].tensor.get().as<float>() + first * 50, (9 - first) * 50,
                some[0].tensor.get().as<float>());
    std::copy_n(all[1].tensor.get().as<float>(), 8 * 50, some[1].tensor.get().as<float>());
    const auto own = testing::run_operator(StreamLogits(kEps), kernels(), some);
    for (int64_t i = 0; i < (9 - first) * 8; ++i)
      EXPECT_EQ(own[0].get().as<float>()[i], whole[0].get().as<float>()[first * 8 + i]);
  }
}

TEST(StreamLogits, BackwardTakesAnAddend) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    auto inputs = make_inputs(dtype, {33, 40, 8});
    Random random(5, 0);
    const auto out = testing::run_operator(StreamLogits(kEps), kernels(), inputs);
    for (const OwnedTensor& output : out) {
      OwnedTensor copy(DType::kF32, output.get().shape);
      std::copy_n(output.get().as<float>(), output.get().num_elements(), copy.get().as<float>());
      inputs.push_back({std::move(copy), Role::kValue, "output"});
    }
    inputs.push_back({random_tensor(DType::kF32, {33, 8}, random), Role::kValue, "grad"});
    testing::check_addend(StreamLogitsBackward(), kernels(), std::move(inputs));
  }
}

TEST(StreamLogits, RefusesWhatDoesNotFit) {
  const StreamLogits op(kEps);
  EXPECT_THROW(op.infer(std::vector<ValueType>{{DType::kF32, {4, 8}}, {DType::kF32, {3, 7}}}),
               UserError);
  EXPECT_THROW(op.infer(std::vector<ValueType>{{DType::kF32, {4, 8}}, {DType::kBF16, {3, 8}}}),
               UserError);
  EXPECT_THROW(StreamLogits(-1), UserError);
}

}  // namespace
}  // namespace tessera
