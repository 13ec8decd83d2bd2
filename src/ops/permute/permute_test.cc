#include "ops/permute/permute.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "ops/add/add.h"
#include "ops/quantize/quantize_testing.h"
#include "ops/testing/addend_check.h"
#include "ops/testing/op_test.h"
#include "ops/testing/program_run.h"

namespace tessera {
namespace {

using testing::list_inputs;
using testing::Role;
using testing::TestInput;

/// A random but consistent pair of maps, with drops and padding.
struct Maps {
  int64_t num_tokens;
  int64_t top_k;
  std::vector<int32_t> row_of_TK;
  std::vector<int32_t> source_R;

  int64_t num_rows() const { return std::ssize(source_R); }
  TestInput row_of() const {
    return {testing::tensor_of_i32({num_tokens, top_k}, row_of_TK), Role::kConstant, "row_of_TK"};
  }
  TestInput source() const {
    return {testing::tensor_of_i32({num_rows()}, source_R), Role::kConstant, "source_R"};
  }
};

Maps random_maps(int64_t num_tokens, int64_t top_k, Random& random) {
  Maps maps{num_tokens, top_k, std::vector<int32_t>(num_tokens * top_k, -1), {}};
  for (size_t i = 0; i < maps.row_of_TK.size(); ++i) {
    if (random.next_below(5) > 0) maps.source_R.push_back(static_cast<int32_t>(i));
    if (random.next_below(5) == 0) maps.source_R.push_back(-1);
  }
  for (size_t r = maps.source_R.size(); r > 1; --r) {
    std::swap(maps.source_R[r - 1], maps.source_R[random.next_below(r)]);
  }
  for (size_t r = 0; r < maps.source_R.size(); ++r) {
    const int32_t source = maps.source_R[r];
    if (source >= 0) maps.row_of_TK[source] = static_cast<int32_t>(r);
  }
  return maps;
}

KernelTable kernels() {
  KernelTable table;
  add_permute_cpu(table);
  return table;
}

/// Rows of FP8 stand for the rows of what x stands for, and padding for zeros.
TEST(Permute, TakesScalesAlong) {
  Random random(11, 1);
  for (const ScaleLayout& layout : {ScaleLayout::row(), ScaleLayout::block(1, 128)}) {
    for (const int64_t width : {1, 40, 300}) {
      const Maps maps = random_maps(7, 3, random);
      const OwnedTensor values = testing::random_tensor(DType::kF32, {7, width}, random, 5.0);
      const testing::ScaledTensor x = testing::quantize(values.get(), {.scale = layout});
      const TestInput source = maps.source();
      const TestInput row_of = maps.row_of();
      const std::vector<Tensor> inputs = {x.tensor, source.tensor.get(), row_of.tensor.get()};
      std::vector<ValueType> types;
      for (const Tensor& input : inputs) types.push_back(testing::type_of(input));
      const testing::ScaledTensor rows(Permute().infer(types)[Permute::kRows]);
      const std::vector<Tensor> outputs = {rows.tensor};
      const KernelTable table = kernels();
      table.find(Permute::kName)->second(Permute(), {.inputs = inputs, .outputs = outputs});
      const std::vector<double> from = testing::values_of(x);
      const std::vector<double> found = testing::values_of(rows);
      for (int64_t i = 0; i < std::ssize(found); ++i) {
        const int64_t at = maps.source_R[i / width];
        EXPECT_EQ(found[i], at < 0 ? 0 : from[at / 3 * width + i % width]);
      }
    }
  }
}

TEST(Permute, RefusesScalesOfSeveralRows) {
  const ValueType map{.dtype = DType::kI32, .shape = {4}};
  for (const ScaleLayout& layout : {ScaleLayout::block(2, 128), ScaleLayout::tensor()}) {
    const ValueType x{.dtype = DType::kE4M3, .shape = {4, 128}, .scale = layout};
    EXPECT_THROW(Permute().infer(std::vector{x, map, map}), UserError);
  }
}

OwnedTensor run(const OperatorPtr& op, const std::vector<TestInput>& inputs) {
  return std::move(testing::run_operator(*op, kernels(), inputs)[0]);
}

TestInput values(DType dtype, const Shape& shape, Random& random, const std::string& name) {
  return {testing::random_tensor(dtype, shape, random), Role::kValue, name};
}

/// Rows of x by source_R, zeros for padding.
OwnedTensor plain_permute(const Maps& maps, const TestInput& x) {
  const auto from = testing::to_doubles(x.tensor);
  const size_t width = x.tensor.get().shape[1];
  std::vector<float> rows;
  for (const int32_t source : maps.source_R) {
    const size_t t = source / maps.top_k;
    for (size_t h = 0; h < width; ++h) {
      rows.push_back(source < 0 ? 0.0F : static_cast<float>(from[t * width + h]));
    }
  }
  return testing::tensor_of({maps.num_rows(), x.tensor.get().shape[1]}, rows, x.tensor.get().dtype);
}

/// Σ_k of each token's rows in order of k, in float, weighted where there are probabilities.
OwnedTensor plain_unpermute(const Maps& maps, const TestInput& y, const float* probs_TK) {
  const auto rows = testing::to_doubles(y.tensor);
  const size_t width = y.tensor.get().shape[1];
  std::vector<float> tokens;
  for (size_t t = 0; t < static_cast<size_t>(maps.num_tokens); ++t) {
    for (size_t h = 0; h < width; ++h) {
      float sum = 0;
      for (size_t i = t * static_cast<size_t>(maps.top_k);
           i < (t + 1) * static_cast<size_t>(maps.top_k); ++i) {
        if (maps.row_of_TK[i] < 0) continue;
        const size_t row = maps.row_of_TK[i];
        const auto value = static_cast<float>(rows[row * width + h]);
        sum += probs_TK == nullptr ? value : value * probs_TK[i];
      }
      tokens.push_back(sum);
    }
  }
  return testing::tensor_of({maps.num_tokens, y.tensor.get().shape[1]}, tokens,
                            y.tensor.get().dtype);
}

struct Sizes {
  int64_t num_tokens;
  int64_t top_k;
  int64_t width;
};
constexpr Sizes kSizes[] = {{0, 2, 8}, {1, 1, 1}, {1, 3, 17}, {37, 2, 40}, {64, 8, 129}};
constexpr DType kTypes[] = {DType::kF32, DType::kBF16};

template <typename Check>
void for_each_case(Check check) {
  Random random(3, 14);
  for (const Sizes& sizes : kSizes) {
    for (const DType dtype : kTypes) {
      SCOPED_TRACE(fmt::format("T={} K={} H={} {}", sizes.num_tokens, sizes.top_k, sizes.width,
                               dtype_name(dtype)));
      check(sizes, dtype, random_maps(sizes.num_tokens, sizes.top_k, random), random);
    }
  }
}

TEST(Permute, CopiesRowsAndZeroesPaddingBitwise) {
  for_each_case([](const Sizes& s, DType dtype, const Maps& maps, Random& random) {
    auto x = values(dtype, {s.num_tokens, s.width}, random, "x");
    const OwnedTensor expected = plain_permute(maps, x);
    const auto rows = run(make_permute(), list_inputs(std::move(x), maps.source(), maps.row_of()));
    testing::expect_bitwise_equal(rows, expected, "rows");
  });
}

TEST(Permute, SumsRowsInOrderOfKBitwise) {
  for_each_case([](const Sizes& s, DType dtype, const Maps& maps, Random& random) {
    auto y = values(dtype, {maps.num_rows(), s.width}, random, "y");
    const OwnedTensor expected = plain_unpermute(maps, y, nullptr);
    const auto tokens =
        run(make_unpermute(), list_inputs(std::move(y), maps.row_of(), maps.source()));
    testing::expect_bitwise_equal(tokens, expected, "tokens");
  });
}

TEST(Permute, WeightsRowsByTheirProbability) {
  for_each_case([](const Sizes& s, DType dtype, const Maps& maps, Random& random) {
    auto y = values(dtype, {maps.num_rows(), s.width}, random, "y");
    auto probs = values(DType::kF32, {s.num_tokens, s.top_k}, random, "probs");
    const OwnedTensor expected = plain_unpermute(maps, y, probs.tensor.get().as<float>());
    const auto tokens = run(make_unpermute_weighted(), list_inputs(std::move(y), std::move(probs),
                                                                   maps.row_of(), maps.source()));
    testing::expect_rows_near(tokens, expected, dtype == DType::kF32 ? 1e-6 : 4e-3, "tokens");
  });
}

TEST(Permute, SumsTakeAnAddendBeforeRounding) {
  for_each_case([](const Sizes& s, DType dtype, const Maps& maps, Random& random) {
    const auto rows = [&] { return values(dtype, {maps.num_rows(), s.width}, random, "y"); };
    auto probs = values(DType::kF32, {s.num_tokens, s.top_k}, random, "probs");
    testing::check_addend(*make_unpermute(), kernels(),
                          list_inputs(rows(), maps.row_of(), maps.source()));
    testing::check_addend(*make_unpermute_weighted(), kernels(),
                          list_inputs(rows(), std::move(probs), maps.row_of(), maps.source()));
  });
}

TEST(Permute, ProbabilitiesGoToRowsAndBack) {
  for_each_case([](const Sizes& s, DType, const Maps& maps, Random& random) {
    auto probs = values(DType::kF32, {s.num_tokens, s.top_k}, random, "probs");
    std::vector<float> there;
    std::vector<float> back;
    const auto given = probs.tensor.get().span<float>();
    for (const int32_t source : maps.source_R) {
      there.push_back(source < 0 ? 0.0F : given[source]);
    }
    for (size_t i = 0; i < given.size(); ++i) {
      back.push_back(maps.row_of_TK[i] < 0 ? 0.0F : given[i]);
    }
    auto rows =
        run(make_permute_probs(), list_inputs(std::move(probs), maps.source(), maps.row_of()));
    testing::expect_bitwise_equal(rows, testing::tensor_of({maps.num_rows()}, there), "rows");
    const auto tokens = run(
        make_unpermute_probs(),
        list_inputs(TestInput{std::move(rows), Role::kValue, "r"}, maps.row_of(), maps.source()));
    testing::expect_bitwise_equal(tokens, testing::tensor_of({s.num_tokens, s.top_k}, back),
                                  "tokens");
  });
}

TEST(Permute, Gradients) {
  Random random(15, 92);
  for (const Sizes& s : {Sizes{1, 2, 3}, Sizes{9, 3, 21}}) {
    const Maps maps = random_maps(s.num_tokens, s.top_k, random);
    const auto tokens = [&] { return values(DType::kF32, {s.num_tokens, s.width}, random, "x"); };
    const auto rows = [&] { return values(DType::kF32, {maps.num_rows(), s.width}, random, "y"); };
    const auto probs = [&] { return values(DType::kF32, {s.num_tokens, s.top_k}, random, "p"); };
    testing::check_gradients(make_permute(), kernels(),
                             list_inputs(tokens(), maps.source(), maps.row_of()));
    testing::check_gradients(make_unpermute(), kernels(),
                             list_inputs(rows(), maps.row_of(), maps.source()));
    testing::check_gradients(make_permute_probs(), kernels(),
                             list_inputs(probs(), maps.source(), maps.row_of()));
    testing::check_gradients(make_unpermute_weighted(), kernels(),
                             list_inputs(rows(), probs(), maps.row_of(), maps.source()));
    testing::check_gradients(std::make_shared<Unpermute>(true), kernels(),
                             list_inputs(rows(), maps.row_of(), maps.source(), tokens()));
    testing::check_gradients(std::make_shared<UnpermuteWeighted>(true), kernels(),
                             list_inputs(rows(), probs(), maps.row_of(), maps.source(), tokens()));
  }
}

TEST(Permute, GradientOfPaddingRowsIsZero) {
  const Maps maps{1, 2, {1, -1}, {-1, 0, -1}};
  Random random(1, 2);
  std::vector<OwnedTensor> grads(1);
  grads[0] = testing::tensor_of({1, 2}, {3, 4});
  const auto result = testing::run_gradients(
      make_unpermute_weighted(), kernels(),
      list_inputs(values(DType::kF32, {3, 2}, random, "y"),
                  TestInput{testing::tensor_of({1, 2}, {0.5F, 7}), Role::kValue, "probs"},
                  maps.row_of(), maps.source()),
      grads);
  testing::expect_bitwise_equal(result[0], testing::tensor_of({3, 2}, {0, 0, 1.5F, 2, 0, 0}), "dy");
  EXPECT_EQ(result[1].get().as<float>()[1], 0.0F) << "a dropped assignment";
}

/// A permutation of ragged rows there and back, as the rows that a rank received are laid out by
/// expert: [T] maps and probabilities, of which fewer are there than the bound.
TEST(Permute, RaggedTokensOfOneAssignmentEach) {
  constexpr int64_t kBound = 5;
  Program program("ragged");
  const ValueId extent = program.add_input("extent", {DType::kI64, {1}});
  const ValueId num_rows = program.add_input("num_rows", {DType::kI64, {1}});
  const ValueId x = program.add_input("x", {DType::kF32, {kBound, 2}, 0, extent});
  const ValueId probs = program.add_input("probs", {DType::kF32, {kBound}, 0, extent});
  const ValueId row_of = program.add_input("row_of", {DType::kI32, {kBound}, 0, extent});
  const ValueId source = program.add_input("source", {DType::kI32, {8}, 0, num_rows});
  const ValueId rows = program.add1(make_permute(), {x, source, row_of}, "rows");
  const ValueId back = program.add1(make_unpermute(), {rows, row_of, source}, "back");
  const ValueId row_probs =
      program.add1(make_permute_probs(), {probs, source, row_of}, "row_probs");
  const ValueId weighted =
      program.add1(make_unpermute_weighted(), {rows, probs, row_of, source}, "weighted");
  EXPECT_EQ(program.type(back), program.type(x));
  EXPECT_EQ(program.type(weighted), program.type(x));
  program.set_outputs({back, row_probs, weighted});
  KernelTable table = kernels();
  add_add_cpu(table);
  const testing::ProgramRun run(program, {{back, row_probs, weighted}, {x, probs}}, table);
  *run.value(extent).as<int64_t>() = 3;
  *run.value(num_rows).as<int64_t>() = 4;
  const auto fill = [](const Tensor& to, const auto& values) {
    std::ranges::copy(values, to.as<typename std::decay_t<decltype(values)>::value_type>());
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  fill(run.value(x), std::vector<float>{1, 2, 3, 4, 5, 6, nan, nan, nan, nan});
  fill(run.value(probs), std::vector<float>{0.5F, 2, 3, nan, nan});
  fill(run.value(row_of), std::vector<int32_t>{3, 0, -1, 99, 99});
  fill(run.value(source), std::vector<int32_t>{1, -1, -1, 0, 99, 99, 99, 99});
  fill(run.grad(back), std::vector<float>{1, 1, 2, 2, 3, 3, nan, nan, nan, nan});
  fill(run.grad(row_probs), std::vector<float>{7, 8, 9, 10, nan, nan, nan, nan});
  fill(run.grad(weighted), std::vector<float>{1, 0, 0, 1, 1, 1, nan, nan, nan, nan});
  run.run_forward();
  run.run_backward();
  const auto expect = [](const Tensor& actual, const std::vector<float>& expected) {
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(actual.as<float>()[i], expected[i]) << i;
  };
  expect(run.value(back), {1, 2, 3, 4, 0, 0});
  expect(run.value(row_probs), {2, 0, 0, 0.5F});
  expect(run.value(weighted), {0.5F, 1, 6, 8, 0, 0});
  expect(run.grad(x), {1.5F, 1, 2, 4, 0, 0});
  expect(run.grad(probs), {11, 11, 0});
}

TEST(Permute, RefusesWhatDoesNotFit) {
  const ValueType x{.dtype = DType::kF32, .shape = {4, 8}};
  const ValueType row_of{.dtype = DType::kI32, .shape = {4, 2}};
  const ValueType source{.dtype = DType::kI32, .shape = {9}};
  const auto infer = [](const OperatorPtr& op, std::vector<ValueType> types) {
    return op->infer(types);
  };
  EXPECT_NO_THROW(infer(make_permute(), {x, source, row_of}));
  EXPECT_THROW(infer(make_permute(), {x, source}), UserError);
  EXPECT_THROW(infer(make_permute(), {row_of, source, row_of}), UserError);
  EXPECT_THROW(infer(make_permute(), {x, with_dtype(source, DType::kI64), row_of}), UserError);
  EXPECT_THROW(infer(make_permute(), {{DType::kF32, {5, 8}}, source, row_of}), UserError);
  EXPECT_THROW(infer(make_unpermute(), {x, row_of, source}), UserError) << "4 rows, not 9";
  EXPECT_THROW(infer(make_permute_probs(), {x, source, row_of}), UserError);
}

}  // namespace
}  // namespace tessera
