#include "ops/multiply/multiply.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ops/testing/op_test.h"

namespace tessera::testing {
namespace {

KernelTable kernels() {
  KernelTable table;
  add_multiply_cpu(table);
  return table;
}

std::vector<TestInput> make_inputs(const Shape& shape, DType dtype) {
  Random random(47, 1);
  std::vector<TestInput> inputs;
  inputs.push_back({random_tensor(dtype, shape, random), Role::kValue, "a"});
  inputs.push_back({random_tensor(dtype, shape, random), Role::kValue, "b"});
  return inputs;
}

TEST(Multiply, RoundsTheProductOnceBitwise) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Shape& shape :
         {Shape{0}, Shape{1}, Shape{3, 5}, Shape{17, 33}, Shape{2, 3, 40}, Shape{50000}}) {
      const auto inputs = make_inputs(shape, dtype);
      const auto a = to_doubles(inputs[0].tensor);
      const auto b = to_doubles(inputs[1].tensor);
      std::vector<float> expected;
      for (size_t i = 0; i < a.size(); ++i)
        expected.push_back(static_cast<float>(a[i]) * static_cast<float>(b[i]));
      const auto outputs = run_operator(Multiply(), kernels(), inputs);
      expect_bitwise_equal(outputs[0], tensor_of(shape, expected, dtype), shape.to_string());
    }
  }
}

TEST(Multiply, GradientsMatchFiniteDifferences) {
  for (const Shape& shape : {Shape{0, 4}, Shape{1, 1}, Shape{5, 7}})
    check_gradients(make_multiply(), kernels(), make_inputs(shape, DType::kF32));
}

TEST(Multiply, ShapeRule) {
  const ValueType x{DType::kBF16, {8, 12}, 0, 3};
  const std::vector<ValueType> both = {x, x};
  EXPECT_EQ(make_multiply()->infer(both)[0], x);
  const auto refuses = [](const std::vector<ValueType>& wrong, const char* message) {
    EXPECT_THAT([&] { Multiply().infer(wrong); },
                ::testing::ThrowsMessage<UserError>(::testing::HasSubstr(message)));
  };
  refuses({x}, "multiply: takes two inputs, got 1");
  refuses({x, with_last_dim(x, 13)}, "multiply: operands differ");
  const ValueType ids = with_dtype(x, DType::kI32);
  refuses({ids, ids}, "multiply: operands are i32, expected f32 or bf16");
}

}  // namespace
}  // namespace tessera::testing
