#include "ops/unit_norm/unit_norm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "ops/testing/op_test.h"

namespace tessera::testing {
namespace {

struct Heads {
  int64_t tokens;
  int64_t count;
  int64_t size;
};
constexpr Heads kCases[] = {{0, 2, 4}, {1, 1, 1}, {3, 2, 5}, {7, 3, 16}, {2, 4, 33}};

KernelTable kernels() {
  KernelTable table;
  add_unit_norm_cpu(table);
  return table;
}

std::vector<TestInput> make_inputs(const Heads& heads, DType dtype) {
  Random random(71, 1);
  return list_inputs(TestInput{
      random_tensor(dtype, {heads.tokens, heads.count * heads.size}, random), Role::kValue, "x"});
}

TEST(UnitNorm, NormsEachHead) {
  constexpr double kEps = 1e-3;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Heads& heads : kCases) {
      const auto inputs = make_inputs(heads, dtype);
      const auto x = to_doubles(inputs[0].tensor);
      std::vector<float> expected(x.size());
      for (size_t begin = 0; begin < x.size(); begin += heads.size) {
        double squares = 0;
        for (int64_t i = 0; i < heads.size; ++i) squares += x[begin + i] * x[begin + i];
        const double root = std::sqrt(squares / static_cast<double>(heads.size) + kEps);
        for (int64_t i = 0; i < heads.size; ++i)
          expected[begin + i] = static_cast<float>(x[begin + i] / root);
      }
      const Shape shape{heads.tokens, heads.count * heads.size};
      const auto outputs = run_operator(UnitNorm(heads.size, kEps), kernels(), inputs);
      expect_rows_near(outputs[0], tensor_of(shape, expected), dtype == DType::kF32 ? 1e-6 : 4e-3,
                       shape.to_string());
    }
  }
}

TEST(UnitNorm, GradientsMatchFiniteDifferences) {
  for (const Heads& heads : kCases)
    check_gradients(make_unit_norm(heads.size, 0.1), kernels(), make_inputs(heads, DType::kF32));
}

TEST(UnitNorm, ShapeRule) {
  const ValueType x{DType::kBF16, {8, 12}, 0, 3};
  EXPECT_EQ(make_unit_norm(4, 0)->infer(std::vector{x})[0], x);
  const auto refuses = [](const std::vector<ValueType>& wrong, const char* message) {
    EXPECT_THAT([&] { UnitNorm(4, 0).infer(wrong); },
                ::testing::ThrowsMessage<UserError>(::testing::HasSubstr(message)));
  };
  refuses({x, x}, "unit_norm: takes x, got 2 inputs");
  refuses({with_last_dim(x, 13)}, "unit_norm: x must be f32 or bf16 [T, heads of 4]");
  EXPECT_THROW(make_unit_norm(0, 1e-6), UserError);
  EXPECT_THROW(make_unit_norm(4, -1), UserError);
}

}  // namespace
}  // namespace tessera::testing
