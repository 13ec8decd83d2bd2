#include "ops/add/add.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ops/testing/op_test.h"
#include "program/differentiate.h"

namespace tessera::testing {
namespace {

KernelTable kernels() {
  KernelTable table;
  add_add_cpu(table);
  return table;
}

std::vector<TestInput> make_inputs(const Shape& shape, DType dtype, Random& random) {
  std::vector<TestInput> inputs;
  inputs.push_back({random_tensor(dtype, shape, random), Role::kValue, "a"});
  inputs.push_back({random_tensor(dtype, shape, random), Role::kValue, "b"});
  return inputs;
}

TEST(Add, SumsBitwise) {
  Random random(41, 1);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Shape& shape :
         {Shape{0}, Shape{1}, Shape{3, 5}, Shape{17, 33}, Shape{2, 3, 40}, Shape{50000}}) {
      const auto inputs = make_inputs(shape, dtype, random);
      const auto a = to_doubles(inputs[0].tensor);
      const auto b = to_doubles(inputs[1].tensor);
      std::vector<float> expected;
      for (size_t i = 0; i < a.size(); ++i)
        expected.push_back(static_cast<float>(a[i]) + static_cast<float>(b[i]));
      const auto outputs = run_operator(*make_add(), kernels(), inputs);
      expect_bitwise_equal(outputs[0], tensor_of(shape, expected, dtype), shape.to_string());
    }
  }
}

/// A program that adds two inputs, or one to itself, and its backward program.
Backward differentiate_add(bool same_operand) {
  Program program("add");
  const ValueType type{DType::kF32, {3, 4}};
  const ValueId a = program.add_input("a", type);
  const ValueId b = same_operand ? a : program.add_input("b", type);
  const ValueId sum = program.add1(make_add(), {a, b}, "sum");
  program.set_outputs({sum});
  const std::vector<ValueId> inputs = same_operand ? std::vector{a} : std::vector{a, b};
  return differentiate(program, {.outputs = {sum}, .inputs = inputs});
}

TEST(Add, BothOperandsTakeTheGradientAsItIs) {
  const Backward backward = differentiate_add(false);
  EXPECT_TRUE(backward.program.nodes().empty());
  ASSERT_EQ(backward.grad_inputs.size(), 2U);
  EXPECT_EQ(backward.grad_inputs[0].backward, backward.grad_outputs[0].backward);
  EXPECT_EQ(backward.grad_inputs[1].backward, backward.grad_outputs[0].backward);
}

TEST(Add, AnOperandAddedToItselfTakesTheGradientTwice) {
  const Backward backward = differentiate_add(true);
  const ValueId grad = backward.grad_outputs[0].backward;
  ASSERT_EQ(backward.program.nodes().size(), 1U);
  EXPECT_EQ(backward.program.nodes()[0].op->name(), "add");
  EXPECT_EQ(backward.program.nodes()[0].inputs, (std::vector{grad, grad}));
}

TEST(Add, ShapeRule) {
  const ValueType x{DType::kBF16, {8, 12}, 0, 3};
  const ValueType same[] = {x, x};
  EXPECT_EQ(make_add()->infer(same)[0], x);
  const auto refuses = [](const std::vector<ValueType>& wrong, const char* message) {
    EXPECT_THAT([&] { make_add()->infer(wrong); },
                ::testing::ThrowsMessage<UserError>(::testing::HasSubstr(message)));
  };
  refuses({x}, "add: takes two inputs, got 1");
  refuses({x, with_last_dim(x, 13)}, "add: operands differ");
  refuses({x, with_dtype(x, DType::kF32)}, "add: operands differ");
  refuses({with_dtype(x, DType::kI32), with_dtype(x, DType::kI32)}, "add: operands are i32");
}

}  // namespace
}  // namespace tessera::testing
