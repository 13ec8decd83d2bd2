#include "ops/gated_delta/gated_delta.h"

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

struct DeltaCase {
  GatedDeltaSpec spec;
  std::vector<int32_t> bounds;
};

KernelTable kernels() {
  KernelTable table;
  add_gated_delta_cpu(table);
  return table;
}

/// Decays and strengths as models have them: below 0, and between 0 and 1.
OwnedTensor random_gates(const Shape& shape, Random& random, bool is_decay) {
  OwnedTensor gates = random_tensor(DType::kF32, shape, random);
  float* values = gates.get().as<float>();
  for (int64_t i = 0; i < shape.num_elements(); ++i)
    values[i] = is_decay ? -0.3F * std::abs(values[i]) : 1.0F / (1.0F + std::exp(-values[i]));
  return gates;
}

std::vector<TestInput> make_inputs(const DeltaCase& c, DType dtype) {
  Random random(5, 0);
  const int64_t tokens = c.bounds.back();
  const Shape keys = {tokens, c.spec.num_key_heads * c.spec.key_size};
  const Shape values = {tokens, c.spec.num_value_heads * c.spec.value_size};
  const Shape gates = {tokens, c.spec.num_value_heads};
  return list_inputs(
      TestInput{random_tensor(dtype, keys, random), Role::kValue, "q"},
      TestInput{random_tensor(dtype, keys, random), Role::kValue, "k"},
      TestInput{random_tensor(dtype, values, random), Role::kValue, "v"},
      TestInput{random_gates(gates, random, true), Role::kValue, "g"},
      TestInput{random_gates(gates, random, false), Role::kValue, "beta"},
      TestInput{testing::tensor_of_i32({std::ssize(c.bounds)}, c.bounds), Role::kConstant, "ends"});
}

std::vector<double> unit(const double* x, int64_t size, double scale) {
  double squares = 0;
  for (int64_t i = 0; i < size; ++i) squares += x[i] * x[i];
  std::vector<double> result(x, x + size);
  for (double& value : result) value *= scale / std::sqrt(squares + 1e-6);
  return result;
}

/// The recurrence, token by token.
std::vector<double> recur(const DeltaCase& c, const std::vector<TestInput>& inputs) {
  const auto& [key_heads, heads, dk, dv] = c.spec;
  std::vector<std::vector<double>> in;
  for (int idx = 0; idx < 5; ++idx) in.push_back(testing::to_doubles(inputs[idx].tensor));
  std::vector<double> o(in[2].size());
  for (size_t s = 0; s + 1 < c.bounds.size(); ++s) {
    for (int64_t n = 0; n < heads; ++n) {
      std::vector<double> state(dk * dv);
      const int64_t key_head = n / (heads / key_heads);
      for (int64_t t = c.bounds[s]; t < c.bounds[s + 1]; ++t) {
        const int64_t key_at = (t * key_heads + key_head) * dk;
        const int64_t value_at = (t * heads + n) * dv;
        const auto q = unit(&in[0][key_at], dk, 1 / std::sqrt(static_cast<double>(dk)));
        const auto k = unit(&in[1][key_at], dk, 1);
        for (int64_t j = 0; j < dv; ++j) {
          double predicted = 0;
          for (int64_t i = 0; i < dk; ++i) {
            state[i * dv + j] *= std::exp(in[3][t * heads + n]);
            predicted += state[i * dv + j] * k[i];
          }
          const double written = (in[2][value_at + j] - predicted) * in[4][t * heads + n];
          for (int64_t i = 0; i < dk; ++i) {
            state[i * dv + j] += k[i] * written;
            o[value_at + j] += state[i * dv + j] * q[i];
          }
        }
      }
    }
  }
  return o;
}

class GatedDeltaCases : public ::testing::TestWithParam<DeltaCase> {};

TEST_P(GatedDeltaCases, EqualsTheRecurrence) {
  const DeltaCase c = GetParam();
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const auto inputs = make_inputs(c, dtype);
    const auto expected = recur(c, inputs);
    const auto out = testing::run_operator(GatedDelta(c.spec), kernels(), inputs);
    const auto actual = testing::to_doubles(out[0]);
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < actual.size(); ++i) {
      ASSERT_NEAR(actual[i], expected[i],
                  (dtype == DType::kF32 ? 5e-6 : 4e-3) * (1 + std::abs(expected[i])))
          << i;
    }
  }
}

TEST_P(GatedDeltaCases, GradientsMatchFiniteDifferences) {
  const DeltaCase c = GetParam();
  testing::check_gradients(make_gated_delta(c.spec), kernels(), make_inputs(c, DType::kF32));
}

INSTANTIATE_TEST_SUITE_P(All, GatedDeltaCases,
                         ::testing::Values(DeltaCase{{1, 1, 4, 4}, {0, 0}},
                                           DeltaCase{{1, 1, 4, 3}, {0, 1}},
                                           DeltaCase{{2, 4, 8, 5}, {0, 3, 3, 4, 20}},
                                           DeltaCase{{1, 3, 17, 16}, {0, 64, 129}},
                                           DeltaCase{{2, 2, 16, 33}, {0, 63, 200}},
                                           DeltaCase{{1, 1, 3, 1}, {0, 130}}));

TEST(GatedDelta, RunsMoreHeadsThanWorkers) {
  const DeltaCase c{{40, 40, 2, 2}, {0, 1, 2, 9}};
  const auto inputs = make_inputs(c, DType::kF32);
  const auto expected = recur(c, inputs);
  const auto out = testing::run_operator(GatedDelta(c.spec), kernels(), inputs);
  const auto actual = testing::to_doubles(out[0]);
  for (size_t i = 0; i < actual.size(); ++i) EXPECT_NEAR(actual[i], expected[i], 1e-5);
  testing::check_gradients(make_gated_delta(c.spec), kernels(), inputs);
}

/// Rows [begin, end) of a tensor [T, C].
Tensor rows_of(const Tensor& x, int64_t begin, int64_t end) {
  return {x.as<float>() + begin * x.shape[1], x.dtype, {end - begin, x.shape[1]}};
}

TEST(GatedDelta, GoesOnFromStates) {
  const DeltaCase c{{2, 4, 8, 5}, {0, 150}};
  const auto inputs = make_inputs(c, DType::kF32);
  const auto whole = testing::run_operator(GatedDelta(c.spec), kernels(), inputs);
  const OwnedTensor states =
      testing::tensor_of({32, 5}, std::vector<float>(160, std::numeric_limits<float>::quiet_NaN()));
  const KernelTable table = kernels();
  const GatedDeltaCached op(c.spec);
  std::vector<std::byte> memory(4 << 20);
  const std::vector<int64_t> steps = {0, 1, 2, 67, 130, 131, 150};
  for (size_t i = 0; i + 1 < steps.size(); ++i) {
    const OwnedTensor start = testing::tensor_of_i32({1}, {static_cast<int32_t>(steps[i])});
    std::vector<Tensor> in;
    for (int idx = 0; idx < 5; ++idx)
      in.push_back(rows_of(inputs[idx].tensor, steps[i], steps[i + 1]));
    in.push_back(start);
    const OwnedTensor o(DType::kF32, {steps[i + 1] - steps[i], 20}, "o");
    const std::vector<Tensor> out = {o, states};
    table.at("gated_delta_cached")(op, {.inputs = in, .outputs = out, .workspace = memory});
    const Tensor expected = rows_of(whole[0], steps[i], steps[i + 1]);
    for (int64_t j = 0; j < expected.num_elements(); ++j)
      EXPECT_NEAR(o.get().as<float>()[j], expected.as<float>()[j], 2e-6);
  }
}

TEST(GatedDelta, RefusesWhatDoesNotFit) {
  EXPECT_THROW(GatedDelta({.num_key_heads = 2, .num_value_heads = 3}), UserError);
  const DeltaCase c{{2, 4, 8, 5}, {0, 20}};
  std::vector<ValueType> types;
  for (const TestInput& input : make_inputs(c, DType::kF32))
    types.push_back({input.tensor.get().dtype, input.tensor.get().shape});
  types[GatedDelta::kBeta].shape = {20, 3};
  EXPECT_THROW(GatedDelta(c.spec).infer(types), UserError);
}

}  // namespace
}  // namespace tessera
