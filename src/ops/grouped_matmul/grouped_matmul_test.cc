#include "ops/grouped_matmul/grouped_matmul.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "ops/testing/op_test.h"

namespace tessera {
namespace {

using testing::Role;
using testing::TestInput;

/// A spec, the rows that each expert has, and H.
struct Case {
  GroupedMatmulSpec spec;
  std::vector<int64_t> rows_of;
  int64_t hidden_size = 24;

  std::vector<int64_t> offsets() const {
    std::vector<int64_t> result{0};
    for (const int64_t rows : rows_of) result.push_back(result.back() + rows);
    return result;
  }
  bool out() const { return spec.side == GroupedSide::kOut; }
  int64_t num_rows() const { return offsets().back(); }
  int64_t narrow_width() const { return std::ranges::max(spec.group_sizes); }
  int64_t weight_rows() const {
    return std::accumulate(spec.group_sizes.begin(), spec.group_sizes.end(), int64_t{0});
  }
  int64_t in_width() const { return out() ? hidden_size : narrow_width(); }
  int64_t out_width() const { return out() ? narrow_width() : hidden_size; }

  std::vector<TestInput> inputs(DType dtype, Random& random) const {
    return testing::list_inputs(
        TestInput{testing::random_tensor(dtype, {num_rows(), in_width()}, random), Role::kValue,
                  "a"},
        TestInput{testing::random_tensor(dtype, {weight_rows(), hidden_size}, random),
                  Role::kWeight, "weight"},
        TestInput{testing::tensor_of_i64({std::ssize(rows_of) + 1}, offsets()), Role::kConstant,
                  "offsets"});
  }
};

Case make_case(GroupedSide side, std::vector<int64_t> sizes, std::vector<int64_t> rows_of,
               int64_t hidden_size = 24) {
  Case c;
  c.spec.group_sizes = std::move(sizes);
  c.spec.side = side;
  c.rows_of = std::move(rows_of);
  c.hidden_size = hidden_size;
  return c;
}

KernelTable kernels() {
  KernelTable table;
  add_grouped_matmul_cpu(table);
  return table;
}

/// Calls run(row, weight row of the expert's block, g_e) for every routed row.
template <typename Run>
void for_each_row(const Case& c, Run run) {
  size_t row = 0;
  size_t block = 0;
  for (size_t e = 0; e < c.rows_of.size(); ++e) {
    const size_t size = c.spec.group_sizes[e];
    for (int64_t i = 0; i < c.rows_of[e]; ++i) run(row++, block, size);
    block += size;
  }
}

/// y of one routed row in double: W_e a or W_eᵀ a.
std::vector<double> plain_row(const Case& c, const double* a, const double* block, size_t size) {
  const size_t hidden = c.hidden_size;
  std::vector<double> y(c.out() ? size : hidden, 0.0);
  for (size_t g = 0; g < size; ++g) {
    for (size_t h = 0; h < hidden; ++h) {
      y[c.out() ? g : h] += block[g * hidden + h] * a[c.out() ? h : g];
    }
  }
  return y;
}

double norm_of(const std::vector<double>& x) {
  return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0));
}

void expect_forward_right(const Case& c, DType dtype) {
  Random random(4, 2);
  const auto inputs = c.inputs(dtype, random);
  const auto y = testing::to_doubles(
      testing::run_operator(*make_grouped_matmul(c.spec), kernels(), inputs)[0]);
  const auto a = testing::to_doubles(inputs[0].tensor);
  const auto w = testing::to_doubles(inputs[1].tensor);
  const auto magnitudes = [](std::vector<double> values) {
    for (double& value : values) value = std::abs(value);
    return values;
  };
  const auto a_size = magnitudes(a);
  const auto w_size = magnitudes(w);
  const double rounding = dtype == DType::kF32 ? 0.0 : 4e-3;  // of the stored result
  for_each_row(c, [&](size_t row, size_t block, size_t size) {
    const size_t a_at = row * static_cast<size_t>(c.in_width());
    const size_t w_at = block * static_cast<size_t>(c.hidden_size);
    const auto expected = plain_row(c, a.data() + a_at, w.data() + w_at, size);
    const auto summands = plain_row(c, a_size.data() + a_at, w_size.data() + w_at, size);
    std::vector<double> error = expected;
    for (size_t i = 0; i < error.size(); ++i) {
      error[i] -= y[row * static_cast<size_t>(c.out_width()) + i];
    }
    EXPECT_LE(norm_of(error), 1e-6 * norm_of(summands) + rounding * norm_of(expected))
        << "row " << row;
  });
}

std::vector<Case> make_cases(GroupedSide side) {
  std::vector<Case> cases;
  const auto add = [&](std::vector<int64_t> sizes, std::vector<int64_t> rows_of, int64_t hidden) {
    cases.push_back(make_case(side, std::move(sizes), std::move(rows_of), hidden));
  };
  add({5}, {0}, 24);
  add({1}, {1}, 1);
  add({40}, {3}, 17);
  add({16, 16, 16, 16}, {0, 70, 0, 1}, 24);
  add({32, 32, 32}, {200, 3, 57}, 24);
  add({48, 7, 33, 1, 20}, {90, 0, 41, 130, 7}, 24);
  add({48, 7, 33}, {2, 0, 5}, 65);
  return cases;
}

constexpr GroupedSide kSides[] = {GroupedSide::kOut, GroupedSide::kIn};

TEST(GroupedMatmul, AgreesWithThePlainProductOfEveryRow) {
  for (const GroupedSide side : kSides) {
    for (const Case& c : make_cases(side)) {
      SCOPED_TRACE(fmt::format("{} H={} R={}", make_grouped_matmul(c.spec)->attributes(),
                               c.hidden_size, c.num_rows()));
      expect_forward_right(c, DType::kF32);
      expect_forward_right(c, DType::kBF16);
    }
  }
}

TEST(GroupedMatmul, GradientsByFiniteDifferences) {
  Random random(77, 1);
  for (const GroupedSide side : kSides) {
    const Case c = make_case(side, {13, 13, 13}, {4, 0, 6}, 9);
    testing::check_gradients(make_grouped_matmul(c.spec), kernels(), c.inputs(DType::kF32, random),
                             {.outputs = {0}, .step = 0.25, .tolerance = 1e-4, .max_probes = 32});
  }
}

/// The gradient of a weight that is a value is one too: the same bits as in an accumulator that
/// held zeros, zeros for experts without rows.
TEST(GroupedMatmul, GivesTheGradientOfAWeightThatIsAValue) {
  Random random(77, 5);
  for (const GroupedSide side : kSides) {
    for (const std::vector<int64_t>& rows_of : {std::vector<int64_t>{4, 0, 6}, {0, 0, 0}}) {
      const Case c = make_case(side, {5, 13, 8}, rows_of, 9);
      std::vector<TestInput> inputs = c.inputs(DType::kF32, random);
      const auto gradients = [&](Role role) {
        inputs[1].role = role;
        const int64_t width = side == GroupedSide::kOut ? 13 : 9;
        std::vector<OwnedTensor> given;
        given.push_back(OwnedTensor(DType::kF32, {c.num_rows(), width}));
        std::ranges::fill(given[0].get().span<float>(), 0.25F);
        return testing::run_gradients(make_grouped_matmul(c.spec), kernels(), inputs, given);
      };
      const auto accumulated = gradients(Role::kWeight);
      const auto value = gradients(Role::kValue);
      testing::expect_bitwise_equal(value[1], accumulated[1], "the weight's gradient");
    }
  }
}

/// Zeroes the columns that an expert does not have, which are undefined.
void clear_unused(const Case& c, const Tensor& narrow) {
  for_each_row(c, [&](size_t row, size_t, size_t size) {
    std::fill(narrow.as<float>() + row * static_cast<size_t>(c.narrow_width()) + size,
              narrow.as<float>() + (row + 1) * static_cast<size_t>(c.narrow_width()), 0.0F);
  });
}

/// dW in double: the outer products of the narrow and the wide row, added over an expert's rows.
OwnedTensor plain_wgrad(const Case& c, const Tensor& narrow, const Tensor& wide) {
  const auto n = testing::to_doubles(narrow);
  const auto w = testing::to_doubles(wide);
  const size_t hidden = c.hidden_size;
  std::vector<double> grad(static_cast<size_t>(c.weight_rows()) * hidden, 0.0);
  for_each_row(c, [&](size_t row, size_t block, size_t size) {
    for (size_t g = 0; g < size; ++g) {
      for (size_t h = 0; h < hidden; ++h) {
        grad[(block + g) * hidden + h] +=
            n[row * static_cast<size_t>(c.narrow_width()) + g] * w[row * hidden + h];
      }
    }
  });
  return testing::tensor_of({c.weight_rows(), c.hidden_size}, {grad.begin(), grad.end()});
}

TEST(GroupedMatmul, WeightGradientsAgreeWithPlainSumsAndAreZeroForEmptyExperts) {
  Random random(78, 1);
  for (const GroupedSide side : kSides) {
    for (const Case& c : make_cases(side)) {
      SCOPED_TRACE(fmt::format("{} R={}", make_grouped_matmul(c.spec)->attributes(), c.num_rows()));
      const auto inputs = c.inputs(DType::kF32, random);
      std::vector<OwnedTensor> grads(1);
      grads[0] = testing::random_tensor(DType::kF32, {c.num_rows(), c.out_width()}, random);
      const auto result =
          testing::run_gradients(make_grouped_matmul(c.spec), kernels(), inputs, grads);
      const Tensor& narrow = c.out() ? grads[0].get() : inputs[0].tensor.get();
      const Tensor& wide = c.out() ? inputs[0].tensor.get() : grads[0].get();
      clear_unused(c, narrow);
      testing::expect_rows_near(result[1], plain_wgrad(c, narrow, wide), 3e-6, "dweight");
    }
  }
}

TEST(GroupedMatmul, SkippedAccumulatorIsNotTouched) {
  const Case c = make_case(GroupedSide::kOut, {8, 8}, {3, 2});
  Random random(1, 5);
  const auto inputs = c.inputs(DType::kF32, random);
  const std::vector<Tensor> in{inputs[0].tensor, inputs[0].tensor, inputs[2].tensor};
  const std::vector<Tensor> out{Tensor{}};
  const GroupedMatmulWgrad op(ExpertSizes({8, 8}, "test"));
  EXPECT_NO_THROW(kernels().at("grouped_matmul_wgrad")(op, {in, out, {}}));
}

/// However few rows there are, and whichever way the work is cut over threads, the same numbers.
TEST(GroupedMatmul, RowsDoNotDependOnTheOtherRows) {
  Random random(79, 1);
  for (const GroupedSide side : kSides) {
    const Case many = make_case(side, {32, 48}, {150, 170}, 40);
    const Case few = make_case(side, {32, 48}, {5, 0}, 40);
    const auto inputs = many.inputs(DType::kF32, random);
    auto few_inputs = few.inputs(DType::kF32, random);
    std::memcpy(few_inputs[0].tensor.get().data, inputs[0].tensor.get().data,
                few_inputs[0].tensor.get().num_bytes());
    std::memcpy(few_inputs[1].tensor.get().data, inputs[1].tensor.get().data,
                few_inputs[1].tensor.get().num_bytes());
    const auto all = testing::run_operator(*make_grouped_matmul(many.spec), kernels(), inputs);
    const auto some = testing::run_operator(*make_grouped_matmul(few.spec), kernels(), few_inputs);
    const size_t width = side == GroupedSide::kOut ? 32 : 40;
    for (size_t row = 0; row < 5; ++row) {
      for (size_t i = 0; i < width; ++i) {
        const size_t at = row * static_cast<size_t>(many.out_width()) + i;
        EXPECT_NEAR(some[0].get().as<float>()[at], all[0].get().as<float>()[at], 2e-5);
      }
    }
  }
}

/// Halves of values and these values themselves give the same products, in F32.
TEST(GroupedMatmul, MultipliesHalvesAsF32) {
  Random random(83, 1);
  const auto as_f32 = [](const OwnedTensor& halves) {
    const std::vector<double> all = testing::to_doubles(halves);
    return testing::tensor_of(halves.get().shape, {all.begin(), all.end()});
  };
  const auto check = [&](const Operator& op, const Shape& a, const Shape& b) {
    SCOPED_TRACE(fmt::format("{} {}", op.name(), op.attributes()));
    std::vector<testing::TestInput> halves;
    std::vector<testing::TestInput> values;
    for (const Shape& shape : {a, b}) {
      halves.push_back(
          {testing::random_tensor(DType::kF16, shape, random), testing::Role::kConstant, "factor"});
      values.push_back({as_f32(halves.back().tensor), testing::Role::kConstant, "factor"});
    }
    for (auto* const inputs : {&halves, &values})
      inputs->push_back(
          {testing::tensor_of_i64({4}, {0, 70, 70, 96}), testing::Role::kConstant, "offsets"});
    const auto found = testing::run_operator(op, kernels(), halves);
    const auto expected = testing::run_operator(op, kernels(), values);
    ASSERT_EQ(found[0].get().dtype, DType::kF32);
    testing::expect_rows_near(found[0], expected[0], 1e-5, "product");
  };
  const std::vector<int64_t> sizes = {24, 24, 24};
  check(*make_grouped_matmul({sizes, GroupedSide::kOut}), {96, 40}, {72, 40});
  check(*make_grouped_matmul({sizes, GroupedSide::kIn}), {96, 24}, {72, 40});
  check(GroupedMatmulWgrad(ExpertSizes(sizes, "test")), {96, 24}, {96, 40});
}

TEST(GroupedMatmul, RefusesWhatDoesNotFit) {
  EXPECT_THROW(make_grouped_matmul({{}, GroupedSide::kOut}), UserError);
  EXPECT_THROW(make_grouped_matmul({{8, 0}, GroupedSide::kOut}), UserError);
  const auto op = make_grouped_matmul({{8, 4}, GroupedSide::kOut});
  const ValueType a{.dtype = DType::kF32, .shape = {5, 16}};
  const ValueType weight{.dtype = DType::kF32, .shape = {12, 16}};
  const ValueType offsets{.dtype = DType::kI64, .shape = {3}};
  const auto infer = [&](std::vector<ValueType> types) { return op->infer(types); };
  EXPECT_EQ(infer({a, weight, offsets})[0].shape, (Shape{5, 8}));
  EXPECT_THROW(infer({a, weight}), UserError);
  EXPECT_THROW(infer({with_dtype(a, DType::kBF16), weight, offsets}), UserError);
  EXPECT_THROW(infer({with_last_dim(a, 8), weight, offsets}), UserError);
  EXPECT_THROW(infer({a, {DType::kF32, {11, 16}}, offsets}), UserError);
  EXPECT_THROW(infer({a, weight, with_last_dim(offsets, 2)}), UserError);
}

TEST(GroupedMatmul, CostCountsTwoFlopsAMultiplyAdd) {
  const auto op = make_grouped_matmul({{8, 8}, GroupedSide::kOut});
  const std::vector<ValueType> inputs{{.dtype = DType::kF32, .shape = {5, 16}},
                                      {.dtype = DType::kF32, .shape = {16, 16}},
                                      {.dtype = DType::kI64, .shape = {3}}};
  EXPECT_EQ(op->cost(inputs, op->infer(inputs)).flops, 2.0 * 5 * 16 * 8);
}

}  // namespace
}  // namespace tessera
