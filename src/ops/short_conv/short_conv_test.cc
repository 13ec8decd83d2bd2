#include "ops/short_conv/short_conv.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "ops/testing/op_test.h"

namespace tessera {
namespace {

using testing::list_inputs;
using testing::random_tensor;
using testing::Role;
using testing::TestInput;

struct ConvCase {
  int64_t channels = 1;
  int64_t taps = 4;
  std::vector<int32_t> bounds;
  bool biased = false;
  bool silu = true;
  int64_t all_channels = 0;  ///< of the weight; 0: `channels`
  int64_t first_channel = 0;

  ShortConvSpec spec() const {
    return {.biased = biased,
            .silu = silu,
            .all_channels = all_channels,
            .first_channel = first_channel};
  }
  int64_t weight_rows() const { return all_channels > 0 ? all_channels : channels; }
};

KernelTable kernels() {
  KernelTable table;
  add_short_conv_cpu(table);
  return table;
}

std::vector<TestInput> make_inputs(const ConvCase& c, DType dtype) {
  Random random(3, 0);
  const int64_t tokens = c.bounds.back();
  auto inputs = list_inputs(
      TestInput{random_tensor(dtype, {tokens, c.channels}, random), Role::kValue, "x"},
      TestInput{random_tensor(DType::kF32, {c.weight_rows(), c.taps}, random), Role::kWeight, "w"},
      TestInput{testing::tensor_of_i32({std::ssize(c.bounds)}, c.bounds), Role::kConstant, "ends"});
  if (c.biased)
    inputs.push_back(
        {random_tensor(DType::kF32, {c.weight_rows()}, random), Role::kWeight, "bias"});
  return inputs;
}

std::vector<double> convolve_plainly(const ConvCase& c, const std::vector<TestInput>& inputs) {
  const auto x = testing::to_doubles(inputs[0].tensor);
  const auto w = testing::to_doubles(inputs[1].tensor);
  std::vector<double> bias(c.weight_rows());
  if (c.biased) bias = testing::to_doubles(inputs[ShortConv::kBias].tensor);
  std::vector<double> y(x.size());
  for (size_t s = 0; s + 1 < c.bounds.size(); ++s) {
    for (int64_t t = c.bounds[s]; t < c.bounds[s + 1]; ++t) {
      for (int64_t ch = 0; ch < c.channels; ++ch) {
        const int64_t own = c.first_channel + ch;
        double sum = bias[own];
        for (int64_t i = 0; i < c.taps; ++i) {
          const int64_t from = t - c.taps + 1 + i;
          if (from >= c.bounds[s]) sum += w[own * c.taps + i] * x[from * c.channels + ch];
        }
        y[t * c.channels + ch] = c.silu ? sum / (1 + std::exp(-sum)) : sum;
      }
    }
  }
  return y;
}

class ShortConvCases : public ::testing::TestWithParam<ConvCase> {};

TEST_P(ShortConvCases, EqualsThePlainSum) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const auto inputs = make_inputs(GetParam(), dtype);
    const auto expected = convolve_plainly(GetParam(), inputs);
    const auto out = testing::run_operator(ShortConv(GetParam().spec()), kernels(), inputs);
    const auto actual = testing::to_doubles(out[0]);
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < actual.size(); ++i) {
      EXPECT_NEAR(actual[i], expected[i],
                  (dtype == DType::kF32 ? 2e-6 : 4e-3) * (1 + std::abs(expected[i])));
    }
  }
}

TEST_P(ShortConvCases, GradientsMatchFiniteDifferences) {
  testing::check_gradients(make_short_conv(GetParam().spec()), kernels(),
                           make_inputs(GetParam(), DType::kF32));
}

INSTANTIATE_TEST_SUITE_P(All, ShortConvCases,
                         ::testing::Values(ConvCase{5, 4, {0, 0}}, ConvCase{3, 4, {0, 1}},
                                           ConvCase{17, 4, {0, 3, 3, 4, 20}},
                                           ConvCase{130, 2, {0, 7, 9}}, ConvCase{64, 1, {0, 6}},
                                           ConvCase{70, 16, {0, 5, 40}},
                                           ConvCase{5, 4, {0, 0}, true},
                                           ConvCase{70, 4, {0, 3, 3, 4, 20}, true},
                                           ConvCase{70, 3, {0, 3, 3, 4, 20}, true, false},
                                           ConvCase{5, 1, {0, 1, 9}, false, false},
                                           ConvCase{5, 4, {0, 2, 9}, true, true, 15, 10},
                                           ConvCase{70, 3, {0, 3, 9}, false, false, 210, 70}));

/// Runs rows [begin, end) of x behind those before them.
OwnedTensor go_on(const std::vector<TestInput>& inputs, ShortConvSpec spec, int64_t begin,
                  int64_t end, const Tensor& state) {
  const Tensor& x = inputs[0].tensor;
  const OwnedTensor y(x.dtype, {end - begin, x.shape[1]}, "y");
  const OwnedTensor start = testing::tensor_of_i32({1}, {static_cast<int32_t>(begin)});
  const Tensor rows{x.as<float>() + begin * x.shape[1], x.dtype, {end - begin, x.shape[1]}};
  std::vector<Tensor> in = {rows, inputs[1].tensor, start};
  if (spec.biased) in.push_back(inputs[ShortConv::kBias].tensor);
  const std::vector<Tensor> out = {y, state};
  const KernelTable table = kernels();
  table.at("short_conv_cached")(ShortConvCached(spec),
                                {.inputs = in, .outputs = out, .workspace = {}});
  return testing::tensor_of(y.get().shape,
                            {y.get().as<float>(), y.get().as<float>() + y.get().num_elements()});
}

TEST(ShortConv, GoesOnFromAState) {
  for (const int64_t taps : {1, 2, 4, 7}) {
    const ConvCase c{70, taps, {0, 12}, taps == 4, taps != 2};
    const auto inputs = make_inputs(c, DType::kF32);
    const auto whole = testing::run_operator(ShortConv(c.spec()), kernels(), inputs);
    const OwnedTensor state = testing::tensor_of(
        {taps, 70}, std::vector<float>(taps * 70, std::numeric_limits<float>::quiet_NaN()));
    const std::vector<int64_t> steps = {0, 1, 2, 7, 8, 12};
    for (size_t i = 0; i + 1 < steps.size(); ++i) {
      const OwnedTensor part = go_on(inputs, c.spec(), steps[i], steps[i + 1], state);
      for (int64_t j = 0; j < part.get().num_elements(); ++j) {
        EXPECT_NEAR(part.get().as<float>()[j], whole[0].get().as<float>()[steps[i] * 70 + j], 1e-6);
      }
    }
  }
}

TEST(ShortConv, RefusesWhatDoesNotFit) {
  const ValueType x{DType::kF32, {4, 8}};
  const ValueType bounds{DType::kI32, {2}};
  EXPECT_THROW(ShortConv().infer(std::vector<ValueType>{x, {DType::kF32, {7, 4}}, bounds}),
               UserError);
  EXPECT_THROW(ShortConv().infer(std::vector<ValueType>{x, {DType::kF32, {8, 17}}, bounds}),
               UserError);
  EXPECT_THROW(ShortConv({.all_channels = 16, .first_channel = 9})
                   .infer(std::vector<ValueType>{x, {DType::kF32, {16, 4}}, bounds}),
               UserError);
}

TEST(ShortConv, RefusesBoundsThatDoNotRise) {
  auto inputs = make_inputs({2, 4, {0, 3, 5}}, DType::kF32);
  inputs[2].tensor = testing::tensor_of_i32({3}, {0, 6, 5});
  EXPECT_THROW(testing::run_operator(ShortConv(), kernels(), inputs), UserError);
}

}  // namespace
}  // namespace tessera
