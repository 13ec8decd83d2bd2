#include "ops/join_rows/join_rows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ops/testing/op_test.h"

namespace tessera::testing {
namespace {

KernelTable kernels() {
  KernelTable table;
  add_join_rows_cpu(table);
  return table;
}

TEST(JoinRows, OneBelowTheOther) {
  const auto inputs =
      list_inputs(TestInput{tensor_of({2, 2}, {1, 2, 3, 4}, DType::kBF16), Role::kValue, "a"},
                  TestInput{tensor_of({1, 2}, {5, 6}, DType::kBF16), Role::kValue, "b"});
  const auto y = run_operator(JoinRows(), kernels(), inputs);
  expect_bitwise_equal(y[0], tensor_of({3, 2}, {1, 2, 3, 4, 5, 6}, DType::kBF16), "y");
}

TEST(JoinRows, GradientsMatchFiniteDifferences) {
  Random random(4, 1);
  for (const auto& [a, b] : {std::pair<int64_t, int64_t>{3, 2}, {0, 4}, {5, 0}, {0, 0}}) {
    check_gradients(
        make_join_rows(), kernels(),
        list_inputs(TestInput{random_tensor(DType::kF32, {a, 3}, random), Role::kValue, "a"},
                    TestInput{random_tensor(DType::kF32, {b, 3}, random), Role::kValue, "b"}));
    check_gradients(
        make_join_rows(), kernels(),
        list_inputs(TestInput{random_tensor(DType::kF32, {a, 3}, random), Role::kConstant, "a"},
                    TestInput{random_tensor(DType::kF32, {b, 3}, random), Role::kValue, "b"}));
  }
}

TEST(JoinRows, ShapeRule) {
  const ValueType a{DType::kF32, {3, 4}};
  const auto refuses = [](const Operator& op, const std::vector<ValueType>& wrong,
                          const char* message) {
    EXPECT_THAT([&] { op.infer(wrong); },
                ::testing::ThrowsMessage<UserError>(::testing::HasSubstr(message)));
  };
  refuses(JoinRows(), {a}, "join_rows: takes two tensors");
  refuses(JoinRows(), {a, {DType::kF32, {3, 5}}}, "differ in type or width");
  refuses(JoinRows(), {a, {DType::kI32, {3, 4}}}, "rows must be f32 or bf16");
  refuses(SplitRows(4), {a}, "split_rows: f32 [3, 4] has fewer than 4 rows");
  EXPECT_THROW(SplitRows(-1), UserError);
}

}  // namespace
}  // namespace tessera::testing
