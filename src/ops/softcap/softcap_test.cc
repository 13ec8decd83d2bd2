#include "ops/softcap/softcap.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "ops/testing/op_test.h"

namespace tessera::testing {
namespace {

KernelTable kernels() {
  KernelTable table;
  add_softcap_cpu(table);
  return table;
}

/// Numbers of all sizes, so that the bounds of the tangent's pieces are met from both sides.
std::vector<float> numbers() {
  std::vector<float> result = {0.0F, -0.0F};
  for (float x = 1e-6F; x < 1e4F; x *= 1.07F) {
    result.push_back(x);
    result.push_back(-x);
  }
  return result;
}

TEST(Softcap, IsTheTangentToARounding) {
  constexpr double kCap = 30;
  const std::vector<float> x = numbers();
  const Shape shape{static_cast<int64_t>(x.size())};
  const auto outputs = run_operator(Softcap(kCap), kernels(),
                                    list_inputs(TestInput{tensor_of(shape, x), Role::kValue, "x"}));
  const auto found = outputs[0].get().span<float>();
  for (size_t i = 0; i < x.size(); ++i) {
    const double expected = kCap * std::tanh(static_cast<double>(x[i]) / kCap);
    EXPECT_NEAR(found[i], expected, 5e-7 * std::abs(expected)) << x[i];
  }
}

TEST(Softcap, RoundsToBF16Once) {
  const std::vector<float> x = {-100.0F, -3.0F, 0.5F, 40.0F};
  const auto outputs =
      run_operator(Softcap(30), kernels(),
                   list_inputs(TestInput{tensor_of({4}, x, DType::kBF16), Role::kValue, "x"}));
  std::vector<float> expected;
  for (const float value : x) expected.push_back(30.0F * std::tanh(value / 30.0F));
  expect_bitwise_equal(outputs[0], tensor_of({4}, expected, DType::kBF16), "capped");
}

TEST(Softcap, ShapeRule) {
  const ValueType x{DType::kBF16, {8, 12}, 0, 3};
  EXPECT_EQ(make_softcap(2)->infer(std::vector{x})[0], x);
  const auto refuses = [](const std::vector<ValueType>& wrong, const char* message) {
    EXPECT_THAT([&] { Softcap(2).infer(wrong); },
                ::testing::ThrowsMessage<UserError>(::testing::HasSubstr(message)));
  };
  refuses({x, x}, "softcap: takes x, got 2 inputs");
  refuses({with_dtype(x, DType::kI32)}, "softcap: x is i32, expected f32 or bf16");
  for (const double cap : {0.0, -1.0, std::numeric_limits<double>::infinity()})
    EXPECT_THROW(make_softcap(cap), UserError);
}

}  // namespace
}  // namespace tessera::testing
