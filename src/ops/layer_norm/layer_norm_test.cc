#include "ops/layer_norm/layer_norm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "ops/testing/op_test.h"

namespace tessera::testing {
namespace {

KernelTable kernels() {
  KernelTable table;
  add_layer_norm_cpu(table);
  return table;
}

TEST(LayerNorm, NormsEachRow) {
  constexpr double kEps = 1e-3;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Shape& shape :
         {Shape{0, 4}, Shape{1, 1}, Shape{3, 5}, Shape{7, 16}, Shape{2, 131}}) {
      Random random(72, 1);
      const int64_t size = shape[1];
      const auto inputs = list_inputs(
          TestInput{random_tensor(dtype, shape, random, 2.0), Role::kConstant, "x"},
          TestInput{random_tensor(DType::kF32, {size}, random), Role::kConstant, "weight"},
          TestInput{random_tensor(DType::kF32, {size}, random), Role::kConstant, "bias"});
      const auto x = to_doubles(inputs[0].tensor);
      const auto weight = to_doubles(inputs[1].tensor);
      const auto bias = to_doubles(inputs[2].tensor);
      std::vector<float> expected(x.size());
      for (size_t begin = 0; begin < x.size(); begin += size) {
        double mean = 0;
        double squares = 0;
        for (int64_t i = 0; i < size; ++i) mean += x[begin + i] / static_cast<double>(size);
        for (int64_t i = 0; i < size; ++i) squares += std::pow(x[begin + i] - mean, 2);
        const double root = std::sqrt(squares / static_cast<double>(size) + kEps);
        for (int64_t i = 0; i < size; ++i)
          expected[begin + i] =
              static_cast<float>((x[begin + i] - mean) / root * weight[i] + bias[i]);
      }
      const auto outputs = run_operator(LayerNorm(kEps), kernels(), inputs);
      expect_rows_near(outputs[0], tensor_of(shape, expected), dtype == DType::kF32 ? 2e-6 : 4e-3,
                       shape.to_string());
    }
  }
}

TEST(LayerNorm, ShapeRule) {
  const ValueType x{DType::kBF16, {8, 12}, 0, 3};
  const ValueType vector{DType::kF32, {12}};
  EXPECT_EQ(make_layer_norm(0)->infer(std::vector{x, vector, vector})[0], x);
  const auto refuses = [](const std::vector<ValueType>& wrong, const char* message) {
    EXPECT_THAT([&] { LayerNorm(0).infer(wrong); },
                ::testing::ThrowsMessage<UserError>(::testing::HasSubstr(message)));
  };
  refuses({x}, "layer_norm: takes x, weight and bias, got 1 inputs");
  refuses({x, vector, with_dtype(vector, DType::kBF16)}, "weight and bias must be f32 [12]");
  refuses({with_dtype(x, DType::kI32), vector, vector}, "x must be f32 or bf16 [T, D]");
  EXPECT_THROW(make_layer_norm(-1), UserError);
}

}  // namespace
}  // namespace tessera::testing
