#include "ops/ssd_scan/ssd_scan.h"

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

struct SsdCase {
  SsdSpec spec;
  std::vector<int32_t> bounds;
};

KernelTable kernels() {
  KernelTable table;
  add_ssd_scan_cpu(table);
  return table;
}

std::vector<TestInput> make_inputs(const SsdCase& c, DType dtype) {
  Random random(5, 0);
  const int64_t tokens = c.bounds.back();
  const SsdSpec& spec = c.spec;
  const Shape states = {tokens, spec.num_groups * spec.state_size};
  const Shape heads = {spec.num_weights()};
  return list_inputs(
      TestInput{random_tensor(dtype, {tokens, spec.num_heads * spec.head_size}, random),
                Role::kValue, "x"},
      TestInput{random_tensor(dtype, {tokens, spec.num_heads}, random), Role::kValue, "dt"},
      TestInput{random_tensor(dtype, states, random, 0.5), Role::kValue, "B"},
      TestInput{random_tensor(dtype, states, random, 0.5), Role::kValue, "C"},
      TestInput{random_tensor(DType::kF32, heads, random), Role::kWeight, "A_log"},
      TestInput{random_tensor(DType::kF32, heads, random), Role::kWeight, "D"},
      TestInput{random_tensor(DType::kF32, heads, random), Role::kWeight, "dt_bias"},
      TestInput{testing::tensor_of_i32({std::ssize(c.bounds)}, c.bounds), Role::kConstant, "ends"});
}

double step_of(const SsdSpec& spec, double x) {
  const double step = std::max(std::log1p(std::exp(x)), spec.min_step);
  return spec.max_step > 0 ? std::min(step, spec.max_step) : step;
}

/// The recurrence, token by token.
std::vector<double> recur(const SsdCase& c, const std::vector<TestInput>& inputs) {
  const SsdSpec& spec = c.spec;
  std::vector<std::vector<double>> in;
  for (int idx = 0; idx < 7; ++idx) in.push_back(testing::to_doubles(inputs[idx].tensor));
  std::vector<double> y(in[SsdScan::kX].size());
  for (size_t s = 0; s + 1 < c.bounds.size(); ++s) {
    for (int64_t h = 0; h < spec.num_heads; ++h) {
      std::vector<double> state(spec.state_size * spec.head_size);
      const int64_t group = h / (spec.num_heads / spec.num_groups);
      for (int64_t t = c.bounds[s]; t < c.bounds[s + 1]; ++t) {
        const int64_t own = spec.first_head + h;
        const double step =
            step_of(spec, in[SsdScan::kDt][t * spec.num_heads + h] + in[SsdScan::kDtBias][own]);
        const double decay = std::exp(-std::exp(in[SsdScan::kALog][own]) * step);
        const int64_t states_at = (t * spec.num_groups + group) * spec.state_size;
        for (int64_t p = 0; p < spec.head_size; ++p) {
          const int64_t at = (t * spec.num_heads + h) * spec.head_size + p;
          y[at] = in[SsdScan::kD][own] * in[SsdScan::kX][at];
          for (int64_t n = 0; n < spec.state_size; ++n) {
            double& number = state[n * spec.head_size + p];
            number = decay * number + step * in[SsdScan::kB][states_at + n] * in[SsdScan::kX][at];
            y[at] += in[SsdScan::kC][states_at + n] * number;
          }
        }
      }
    }
  }
  return y;
}

class SsdScanCases : public ::testing::TestWithParam<SsdCase> {};

TEST_P(SsdScanCases, EqualsTheRecurrence) {
  const SsdCase c = GetParam();
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const auto inputs = make_inputs(c, dtype);
    const auto expected = recur(c, inputs);
    const auto out = testing::run_operator(SsdScan(c.spec), kernels(), inputs);
    const auto actual = testing::to_doubles(out[0]);
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < actual.size(); ++i) {
      ASSERT_NEAR(actual[i], expected[i],
                  (dtype == DType::kF32 ? 5e-6 : 4e-3) * (1 + std::abs(expected[i])))
          << i;
    }
  }
}

TEST_P(SsdScanCases, GradientsMatchFiniteDifferences) {
  const SsdCase c = GetParam();
  testing::check_gradients(make_ssd_scan(c.spec), kernels(), make_inputs(c, DType::kF32));
}

INSTANTIATE_TEST_SUITE_P(
    All, SsdScanCases,
    ::testing::Values(SsdCase{{1, 1, 4, 4}, {0, 0}}, SsdCase{{1, 1, 4, 3}, {0, 1}},
                      SsdCase{{4, 2, 5, 8}, {0, 3, 3, 4, 20}},
                      SsdCase{{3, 1, 16, 17}, {0, 64, 129}}, SsdCase{{2, 2, 33, 5}, {0, 63, 150}},
                      SsdCase{{1, 1, 1, 3}, {0, 130}}, SsdCase{{2, 1, 5, 4, 0, 0, 6, 0}, {0, 9}},
                      SsdCase{{4, 2, 5, 8, 0, 0, 9, 5}, {0, 3, 3, 4, 20}}));

/// Limits that some steps meet; where they do, dt has no gradient.
TEST(SsdScan, KeepsStepsWithinTheirLimits) {
  const SsdCase c{
      {.num_heads = 2, .head_size = 3, .state_size = 4, .min_step = 0.4, .max_step = 1.1},
      {0, 5, 40}};
  const auto inputs = make_inputs(c, DType::kF32);
  const auto expected = recur(c, inputs);
  const auto actual =
      testing::to_doubles(testing::run_operator(SsdScan(c.spec), kernels(), inputs)[0]);
  for (size_t i = 0; i < actual.size(); ++i) EXPECT_NEAR(actual[i], expected[i], 1e-5);
  // A small step, so that few differences reach over a limit's corner.
  testing::check_gradients(make_ssd_scan(c.spec), kernels(), inputs, {.step = 1e-3});
}

TEST(SsdScan, RunsMoreHeadsThanWorkersAndParts) {
  const SsdCase c{{40, 2, 2, 3}, {0, 1, 2, 9}};
  const auto inputs = make_inputs(c, DType::kF32);
  const auto expected = recur(c, inputs);
  const auto actual =
      testing::to_doubles(testing::run_operator(SsdScan(c.spec), kernels(), inputs)[0]);
  for (size_t i = 0; i < actual.size(); ++i) EXPECT_NEAR(actual[i], expected[i], 1e-5);
  testing::check_gradients(make_ssd_scan(c.spec), kernels(), inputs);
}

/// Rows [begin, end) of a tensor [T, C].
Tensor rows_of(const Tensor& x, int64_t begin, int64_t end) {
  return {x.as<float>() + begin * x.shape[1], x.dtype, {end - begin, x.shape[1]}};
}

TEST(SsdScan, GoesOnFromStates) {
  const SsdCase c{{4, 2, 5, 8}, {0, 90}};
  const auto inputs = make_inputs(c, DType::kF32);
  const auto whole = testing::run_operator(SsdScan(c.spec), kernels(), inputs);
  const OwnedTensor states =
      testing::tensor_of({32, 5}, std::vector<float>(160, std::numeric_limits<float>::quiet_NaN()));
  const KernelTable table = kernels();
  const SsdScanCached op(c.spec);
  const std::vector<int64_t> steps = {0, 1, 2, 67, 68, 90};
  for (size_t i = 0; i + 1 < steps.size(); ++i) {
    const OwnedTensor start = testing::tensor_of_i32({1}, {static_cast<int32_t>(steps[i])});
    std::vector<Tensor> in;
    for (int idx = 0; idx < 4; ++idx)
      in.push_back(rows_of(inputs[idx].tensor, steps[i], steps[i + 1]));
    for (int idx = 4; idx < 7; ++idx) in.push_back(inputs[idx].tensor);
    in.push_back(start);
    const OwnedTensor y(DType::kF32, {steps[i + 1] - steps[i], 20}, "y");
    const std::vector<Tensor> out = {y, states};
    table.at("ssd_scan_cached")(op, {.inputs = in, .outputs = out, .workspace = {}});
    const Tensor expected = rows_of(whole[0], steps[i], steps[i + 1]);
    for (int64_t j = 0; j < expected.num_elements(); ++j)
      EXPECT_EQ(y.get().as<float>()[j], expected.as<float>()[j]);
  }
}

TEST(SsdScan, RefusesWhatDoesNotFit) {
  EXPECT_THROW(SsdScan({.num_heads = 3, .num_groups = 2}), UserError);
  EXPECT_THROW(SsdScan({.min_step = 2, .max_step = 1}), UserError);
  EXPECT_THROW(SsdScan({.num_heads = 2, .all_heads = 4, .first_head = 3}), UserError);
  const SsdCase c{{4, 2, 8, 5}, {0, 20}};
  std::vector<ValueType> types;
  for (const TestInput& input : make_inputs(c, DType::kF32))
    types.push_back({input.tensor.get().dtype, input.tensor.get().shape});
  types[SsdScan::kDt].shape = {20, 3};
  EXPECT_THROW(SsdScan(c.spec).infer(types), UserError);
}

}  // namespace
}  // namespace tessera
