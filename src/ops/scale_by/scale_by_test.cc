#include "ops/scale_by/scale_by.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ops/testing/op_test.h"

namespace tessera::testing {
namespace {

KernelTable kernels() {
  KernelTable table;
  add_scale_by_cpu(table);
  return table;
}

std::vector<TestInput> make_inputs(const Shape& shape, DType dtype, float factor) {
  Random random(43, 1);
  return list_inputs(TestInput{random_tensor(dtype, shape, random), Role::kValue, "x"},
                     TestInput{tensor_of({1}, {factor}), Role::kConstant, "factor"});
}

/// A factor that is a power of two, so that no product rounds.
TEST(ScaleBy, MultipliesBitwise) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Shape& shape : {Shape{0}, Shape{3, 5}, Shape{17, 33}, Shape{2, 3, 40}}) {
      const auto inputs = make_inputs(shape, dtype, 0.25F);
      std::vector<float> expected;
      for (const double x : to_doubles(inputs[0].tensor))
        expected.push_back(static_cast<float>(x) * 0.25F);
      const auto outputs = run_operator(ScaleBy(), kernels(), inputs);
      expect_bitwise_equal(outputs[0], tensor_of(shape, expected, dtype), shape.to_string());
    }
  }
}

TEST(ScaleBy, GradientsMatchFiniteDifferences) {
  for (const Shape& shape : {Shape{0, 4}, Shape{1, 1}, Shape{5, 7}})
    check_gradients(make_scale_by(), kernels(), make_inputs(shape, DType::kF32, -0.3F));
}

TEST(ScaleBy, ShapeRule) {
  const ValueType x{DType::kBF16, {8, 12}, 0, 3};
  const ValueType factor{DType::kF32, {1}};
  EXPECT_EQ(make_scale_by()->infer(std::vector{x, factor})[0], x);
  const auto refuses = [](const std::vector<ValueType>& wrong, const char* message) {
    EXPECT_THAT([&] { ScaleBy().infer(wrong); },
                ::testing::ThrowsMessage<UserError>(::testing::HasSubstr(message)));
  };
  refuses({x}, "scale_by: takes x and a factor, got 1 inputs");
  refuses({x, x}, "scale_by: the factor must be");
  refuses({with_dtype(x, DType::kI32), factor}, "scale_by: x is i32, expected f32 or bf16");
}

}  // namespace
}  // namespace tessera::testing
