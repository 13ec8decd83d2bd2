#include "ops/block_linear/block_linear.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ops/testing/op_test.h"

namespace tessera::testing {
namespace {

struct Blocks {
  int64_t tokens;
  int64_t count;
  int64_t rows;     ///< of a block
  int64_t columns;  ///< of a block
};
constexpr Blocks kCases[] = {
    {0, 2, 3, 4}, {1, 1, 1, 1}, {5, 3, 4, 7}, {17, 4, 16, 8}, {3, 1, 5, 9}};

KernelTable kernels() {
  KernelTable table;
  add_block_linear_cpu(table);
  return table;
}

std::vector<TestInput> make_inputs(const Blocks& b, DType dtype) {
  Random random(61, 1);
  return list_inputs(
      TestInput{random_tensor(dtype, {b.tokens, b.count * b.columns}, random), Role::kValue, "x"},
      TestInput{random_tensor(dtype, {b.count * b.rows, b.columns}, random), Role::kWeight, "w"});
}

std::vector<TestInput> make_shared_inputs(const Blocks& b, DType dtype) {
  Random random(62, 1);
  return list_inputs(
      TestInput{random_tensor(dtype, {b.tokens, b.count * b.columns}, random), Role::kValue, "x"},
      TestInput{random_tensor(dtype, {b.rows, b.columns}, random), Role::kWeight, "w"});
}

/// y[t, g·R + r] = sum over c of x[t, g·C + c] · w[g·R + r, c].
OwnedTensor multiply(const Blocks& b, const std::vector<double>& x, const std::vector<double>& w) {
  std::vector<float> y;
  for (int64_t t = 0; t < b.tokens; ++t) {
    for (int64_t row = 0; row < b.count * b.rows; ++row) {
      const int64_t block = row / b.rows;
      double sum = 0;
      for (int64_t c = 0; c < b.columns; ++c)
        sum += x[(t * b.count + block) * b.columns + c] * w[row * b.columns + c];
      y.push_back(static_cast<float>(sum));
    }
  }
  return tensor_of({b.tokens, b.count * b.rows}, y);
}

TEST(BlockLinear, MultipliesBlockByBlock) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Blocks& b : kCases) {
      const auto inputs = make_inputs(b, dtype);
      const auto expected = multiply(b, to_doubles(inputs[0].tensor), to_doubles(inputs[1].tensor));
      const auto outputs = run_operator(BlockLinear(b.count), kernels(), inputs);
      expect_rows_near(outputs[0], expected, dtype == DType::kF32 ? 1e-5 : 1e-2, "y");
    }
  }
}

/// Whose rows do not depend on one another, for decoding.
TEST(BlockLinear, RowsByThemselves) {
  KernelTable table;
  add_block_linear_of_rows_cpu(table);
  const Blocks& b = kCases[3];
  const auto inputs = make_inputs(b, DType::kF32);
  const auto expected = multiply(b, to_doubles(inputs[0].tensor), to_doubles(inputs[1].tensor));
  expect_rows_near(run_operator(BlockLinear(b.count), table, inputs)[0], expected, 1e-5, "y");
}

TEST(BlockLinear, GradientsMatchFiniteDifferences) {
  for (const Blocks& b : kCases)
    check_gradients(make_block_linear(b.count), kernels(), make_inputs(b, DType::kF32));
}

/// The same as of a weight that repeats the one.
TEST(BlockLinear, SharesAWeight) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Blocks& b : kCases) {
      const auto inputs = make_shared_inputs(b, dtype);
      const auto one = to_doubles(inputs[1].tensor);
      std::vector<double> repeated;
      for (int64_t block = 0; block < b.count; ++block)
        repeated.insert(repeated.end(), one.begin(), one.end());
      const auto expected = multiply(b, to_doubles(inputs[0].tensor), repeated);
      const auto outputs = run_operator(BlockLinear(b.count, true), kernels(), inputs);
      expect_rows_near(outputs[0], expected, dtype == DType::kF32 ? 1e-5 : 1e-2, "y");
    }
  }
}

TEST(BlockLinear, GradientsOfASharedWeight) {
  for (const Blocks& b : kCases)
    check_gradients(make_block_linear(b.count, true), kernels(),
                    make_shared_inputs(b, DType::kF32));
}

TEST(BlockLinear, CountsItsBlocksAlone) {
  const BlockLinear op(4);
  const std::vector<ValueType> inputs = {{DType::kF32, {10, 8}}, {DType::kF32, {12, 2}}};
  EXPECT_EQ(op.cost(inputs, op.infer(inputs)).flops, 2.0 * 10 * 12 * 2);
  const BlockLinear shared(4, true);
  const std::vector<ValueType> one = {{DType::kF32, {10, 8}}, {DType::kF32, {3, 2}}};
  EXPECT_EQ(shared.cost(one, shared.infer(one)).flops, 2.0 * 10 * 12 * 2);
}

TEST(BlockLinear, ShapeRule) {
  const BlockLinear op(2);
  const ValueType x{DType::kBF16, {3, 8}};
  const ValueType weight{DType::kBF16, {6, 4}};
  EXPECT_EQ(op.infer(std::vector{x, weight})[0], (ValueType{DType::kBF16, {3, 6}}));
  const auto refuses = [&](const std::vector<ValueType>& wrong, const char* message) {
    EXPECT_THAT([&] { op.infer(wrong); },
                ::testing::ThrowsMessage<UserError>(::testing::HasSubstr(message)));
  };
  refuses({x}, "block_linear: takes x and weight");
  refuses({{DType::kBF16, {3, 7}}, weight}, "is not of 2 equal blocks");
  refuses({x, {DType::kBF16, {5, 4}}}, "is not of 2 equal blocks");
  refuses({x, {DType::kBF16, {6, 8}}}, "a block of x");
  refuses({x, {DType::kF32, {6, 4}}}, "as the rows are");
  EXPECT_THROW(BlockLinear(0), UserError);
  const BlockLinear shared(2, true);
  const ValueType one{DType::kBF16, {3, 4}};
  EXPECT_EQ(shared.infer(std::vector{x, one})[0], (ValueType{DType::kBF16, {3, 6}}));
  EXPECT_EQ(shared.attributes(), "blocks=2 shared");
}

}  // namespace
}  // namespace tessera::testing
