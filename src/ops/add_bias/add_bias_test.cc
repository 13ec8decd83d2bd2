#include "ops/add_bias/add_bias.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ops/testing/op_test.h"

namespace tessera::testing {
namespace {

KernelTable kernels() {
  KernelTable table;
  add_add_bias_cpu(table);
  return table;
}

std::vector<TestInput> make_inputs(const Shape& shape, DType dtype, Random& random) {
  return list_inputs(
      TestInput{random_tensor(dtype, shape, random), Role::kValue, "x"},
      TestInput{random_tensor(DType::kF32, {shape[1]}, random), Role::kWeight, "bias"});
}

TEST(AddBias, AddsToEveryRowAndRoundsOnce) {
  Random random(1, 1);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Shape& shape : {Shape{0, 3}, Shape{1, 1}, Shape{7, 33}, Shape{130, 64}}) {
      const auto inputs = make_inputs(shape, dtype, random);
      const auto x = to_doubles(inputs[0].tensor);
      const auto bias = to_doubles(inputs[1].tensor);
      std::vector<float> expected;
      for (size_t i = 0; i < x.size(); ++i)
        expected.push_back(static_cast<float>(x[i]) + static_cast<float>(bias[i % bias.size()]));
      expect_bitwise_equal(run_operator(*make_add_bias(), kernels(), inputs)[0],
                           tensor_of(shape, expected, dtype), shape.to_string());
    }
  }
}

TEST(AddBias, Gradients) {
  Random random(2, 1);
  for (const Shape& shape : {Shape{1, 1}, Shape{40, 5}})
    check_gradients(make_add_bias(), kernels(), make_inputs(shape, DType::kF32, random));
}

TEST(AddBias, ShapeRule) {
  const ValueType x{DType::kBF16, {8, 12}, 0, 3};
  const ValueType bias{DType::kF32, {12}};
  const ValueType good[] = {x, bias};
  EXPECT_EQ(make_add_bias()->infer(good)[0], x);
  const auto refuses = [](const std::vector<ValueType>& wrong) {
    EXPECT_THROW(make_add_bias()->infer(wrong), UserError);
  };
  refuses({x});
  refuses({x, with_dtype(bias, DType::kBF16)});
  refuses({x, {DType::kF32, {11}}});
  refuses({with_dtype(x, DType::kI32), bias});
}

}  // namespace
}  // namespace tessera::testing
