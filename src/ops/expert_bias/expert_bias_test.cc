#include "ops/expert_bias/expert_bias.h"

#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <set>

#include "ops/expert_bias/expert_bias_testing.h"

namespace tessera::testing {
namespace {

KernelTable kernels() {
  KernelTable table;
  add_expert_bias_cpu(table);
  return table;
}

std::vector<BiasCase> bias_cases() {
  std::vector<BiasCase> cases;
  for (const bool probs : {false, true}) {
    cases.push_back({{.sizes = {5}, .apply_prob = probs}, {0}, 5});
    cases.push_back({{.sizes = {1}, .apply_prob = probs}, {1}, 1});
    cases.push_back({{.sizes = {33, 33, 33}, .apply_prob = probs}, {0, 19, 0}, 33});
    cases.push_back({{.sizes = {16, 7, 40, 1}, .apply_prob = probs}, {3, 21, 0, 18}, 40});
    cases.push_back({{.sizes = {70, 70}, .apply_prob = probs}, {300, 5}, 70});
    cases.push_back({{.sizes = {6, 6, 6}, .first_column = 6, .apply_prob = probs}, {4, 0, 9}, 18});
    cases.push_back({{.sizes = {16, 8, 24}, .apply_prob = probs, .block_size = 8}, {16, 0, 8}});
  }
  return cases;
}

/// What is added to element `i` of x; none where the row does not define it.
std::optional<double> addend_of(const BiasCase& c, int64_t i, const std::vector<double>& bias,
                                const std::vector<double>& probs) {
  int64_t row = 0;
  int64_t column = 0;
  int64_t begin = 0;
  for (size_t e = 0; e < c.rows_of.size(); ++e) {
    const int64_t size = c.spec.sizes[e];
    const int64_t width = c.is_sparse() ? size : c.width;
    if (i >= c.rows_of[e] * width) {
      i -= c.rows_of[e] * width;
      row += c.rows_of[e];
      begin += size;
      continue;
    }
    row += i / width;
    column = i % width - c.spec.first_column;
    if (column >= size && c.spec.first_column == 0) return std::nullopt;
    const double factor = c.spec.apply_prob ? probs[row] : 1.0;
    return column < 0 || column >= size ? 0.0 : factor * bias[begin + column];
  }
  return std::nullopt;
}

TEST(ExpertBias, AddsToEveryRowThatOfItsExpert) {
  Random random(1, 7);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const BiasCase& c : bias_cases()) {
      const OperatorPtr op = make_expert_bias(c.spec);
      SCOPED_TRACE(fmt::format("{} {}", op->attributes(), dtype_name(dtype)));
      const auto inputs = c.inputs(dtype, random);
      const auto x = to_doubles(inputs[0].tensor);
      const auto bias = to_doubles(inputs[1].tensor);
      const auto probs = to_doubles(inputs[2].tensor);
      const auto y = to_doubles(run_operator(*op, kernels(), inputs)[0]);
      for (size_t i = 0; i < x.size(); ++i) {
        const auto addend = addend_of(c, static_cast<int64_t>(i), bias, probs);
        if (!addend) continue;
        EXPECT_NEAR(y[i], x[i] + *addend,
                    (dtype == DType::kF32 ? 1e-6 : 4e-3) * (1 + std::abs(x[i]) + std::abs(*addend)))
            << i;
      }
    }
  }
}

TEST(ExpertBias, Gradients) {
  Random random(2, 7);
  for (const BiasCase& c : bias_cases()) {
    SCOPED_TRACE(make_expert_bias(c.spec)->attributes());
    const std::set<int64_t> sizes(c.spec.sizes.begin(), c.spec.sizes.end());
    // Columns beyond an expert's own are undefined in a matrix.
    if (sizes.size() > 1 && !c.is_sparse()) continue;
    check_gradients(make_expert_bias(c.spec), kernels(), c.inputs(DType::kF32, random));
  }
}

/// Of experts of different sizes, against the sums over their rows.
TEST(ExpertBias, GradientsOfDifferentSizes) {
  const BiasCase c{{.sizes = {3, 5, 2}, .apply_prob = true}, {2, 4, 1}, 5};
  Random random(3, 7);
  const auto inputs = c.inputs(DType::kF32, random);
  std::vector<OwnedTensor> grad_y;
  grad_y.push_back(random_tensor(DType::kF32, c.shape(), random));
  const auto g = to_doubles(grad_y[0]);
  const auto bias = to_doubles(inputs[1].tensor);
  const auto probs = to_doubles(inputs[2].tensor);
  const auto grads = run_gradients(make_expert_bias(c.spec), kernels(), inputs, grad_y);
  std::vector<float> of_bias(10);
  std::vector<float> of_probs(7);
  const auto offsets = c.offsets();
  int64_t begin = 0;
  for (size_t e = 0; e < 3; ++e) {
    for (int64_t row = offsets[e]; row < offsets[e + 1]; ++row) {
      for (int64_t i = 0; i < c.spec.sizes[e]; ++i) {
        of_bias[begin + i] += static_cast<float>(probs[row] * g[row * 5 + i]);
        of_probs[row] += static_cast<float>(bias[begin + i] * g[row * 5 + i]);
      }
    }
    begin += c.spec.sizes[e];
  }
  expect_rows_near(grads[1], tensor_of({10}, of_bias), 1e-6, "biases");
  expect_rows_near(grads[2], tensor_of({7}, of_probs), 1e-6, "probabilities");
}

TEST(ExpertBias, RefusesWhatDoesNotFit) {
  EXPECT_THROW(make_expert_bias({.sizes = {}}), UserError);
  EXPECT_THROW(make_expert_bias({.sizes = {8}, .first_column = 8, .block_size = 8}), UserError);
  const OperatorPtr op = make_expert_bias({.sizes = {4, 4}, .first_column = 4});
  const ValueType x{DType::kBF16, {9, 8}};
  const ValueType bias{DType::kF32, {8}};
  const ValueType offsets{DType::kI64, {3}};
  EXPECT_EQ(op->infer(std::vector{x, bias, offsets}), std::vector{x});
  const auto refuses = [&](const std::vector<ValueType>& wrong) {
    EXPECT_THROW(op->infer(wrong), UserError);
  };
  refuses({x, bias});
  refuses({{DType::kBF16, {9, 7}}, bias, offsets});
  refuses({x, {DType::kF32, {7}}, offsets});
  refuses({x, {DType::kBF16, {8}}, offsets});
  refuses({x, bias, {DType::kI64, {2}}});
}

}  // namespace
}  // namespace tessera::testing
