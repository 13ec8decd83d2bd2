#include "ops/scale/scale.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "ops/testing/addend_check.h"
#include "ops/testing/op_test.h"

namespace tessera::testing {
namespace {

KernelTable kernels() {
  KernelTable table;
  add_scale_cpu(table);
  return table;
}

std::vector<TestInput> make_inputs(const Shape& shape, DType dtype, bool addend) {
  Random random(43, 1);
  std::vector<TestInput> inputs;
  inputs.push_back({random_tensor(dtype, shape, random), Role::kValue, "x"});
  if (addend) inputs.push_back({random_tensor(dtype, shape, random), Role::kValue, "addend"});
  return inputs;
}

/// A factor that is a power of two, so that no product rounds.
TEST(Scale, MultipliesAndAddsBitwise) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const bool addend : {false, true}) {
      for (const Shape& shape :
           {Shape{0}, Shape{1}, Shape{3, 5}, Shape{17, 33}, Shape{2, 3, 40}, Shape{50000}}) {
        const auto inputs = make_inputs(shape, dtype, addend);
        const auto x = to_doubles(inputs[0].tensor);
        const auto other =
            addend ? to_doubles(inputs[1].tensor) : std::vector<double>(x.size(), 0.0);
        std::vector<float> expected;
        for (size_t i = 0; i < x.size(); ++i)
          expected.push_back(static_cast<float>(x[i]) * 0.25F + static_cast<float>(other[i]));
        const auto outputs = run_operator(Scale(0.25, addend), kernels(), inputs);
        expect_bitwise_equal(outputs[0], tensor_of(shape, expected, dtype), shape.to_string());
      }
    }
  }
}

TEST(Scale, GradientsMatchFiniteDifferences) {
  for (const bool addend : {false, true}) {
    for (const Shape& shape : {Shape{0, 4}, Shape{1, 1}, Shape{5, 7}}) {
      check_gradients(std::make_shared<Scale>(-0.3, addend), kernels(),
                      make_inputs(shape, DType::kF32, addend));
    }
  }
}

TEST(Scale, AddsInF32AndRoundsOnce) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Shape& shape : {Shape{0, 4}, Shape{1, 1}, Shape{19, 35}})
      check_addend(Scale(0.22), kernels(), make_inputs(shape, dtype, false));
  }
}

TEST(Scale, TakesOneAddend) {
  const std::vector<ValueType> types = {{DType::kF32, {4, 6}}};
  const OperatorPtr adding = Scale(3).with_addend(types);
  ASSERT_NE(adding, nullptr);
  EXPECT_EQ(dynamic_cast<const Scale&>(*adding).with_addend(types), nullptr);
}

TEST(Scale, ShapeRule) {
  const ValueType x{DType::kBF16, {8, 12}, 0, 3};
  const std::vector<ValueType> one = {x};
  EXPECT_EQ(make_scale(2)->infer(one)[0], x);
  const auto refuses = [](bool addend, const std::vector<ValueType>& wrong, const char* message) {
    EXPECT_THAT([&] { Scale(2, addend).infer(wrong); },
                ::testing::ThrowsMessage<UserError>(::testing::HasSubstr(message)));
  };
  refuses(false, {x, x}, "scale: takes x, got 2 inputs");
  refuses(true, {x}, "scale: takes x and an addend, got 1 inputs");
  refuses(true, {x, with_last_dim(x, 13)}, "scale: the addend must be");
  refuses(false, {with_dtype(x, DType::kI32)}, "scale: x is i32, expected f32 or bf16");
  EXPECT_THROW(make_scale(std::numeric_limits<double>::infinity()), UserError);
}

}  // namespace
}  // namespace tessera::testing
