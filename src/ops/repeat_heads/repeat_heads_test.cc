#include "ops/repeat_heads/repeat_heads.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ops/testing/op_test.h"
#include "ops/testing/transpose.h"

namespace tessera::testing {
namespace {

KernelTable kernels() {
  KernelTable table;
  add_repeat_heads_cpu(table);
  return table;
}

struct Case {
  int64_t tokens, heads, times, size;
};

std::vector<Case> cases() {
  return {{0, 1, 2, 4}, {1, 1, 1, 1}, {5, 2, 3, 7}, {9, 3, 2, 64}, {4, 1, 5, 33}};
}

TEST(RepeatHeads, PutsTheCopiesSideBySide) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const auto& [tokens, heads, times, size] : cases()) {
      Random random(3, 1);
      auto inputs = list_inputs(TestInput{random_tensor(dtype, {tokens, heads * size}, random)});
      const auto values = to_doubles(inputs[0].tensor);
      std::vector<float> expected;
      for (int64_t head = 0; head < tokens * heads; ++head) {
        for (int64_t i = 0; i < times * size; ++i)
          expected.push_back(static_cast<float>(values[head * size + i % size]));
      }
      const auto outputs = run_operator(*make_repeat_heads(heads, times), kernels(), inputs);
      expect_bitwise_equal(outputs[0], tensor_of({tokens, heads * times * size}, expected, dtype),
                           "copies");
    }
  }
}

TEST(SumHeads, SumsTheCopiesAndRoundsOnce) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const auto& [tokens, heads, times, size] : cases()) {
      Random random(4, 1);
      auto inputs =
          list_inputs(TestInput{random_tensor(dtype, {tokens, heads * times * size}, random)});
      const auto values = to_doubles(inputs[0].tensor);
      std::vector<float> expected;
      for (int64_t i = 0; i < tokens * heads * size; ++i) {
        float sum = 0;
        for (int64_t copy = 0; copy < times; ++copy)
          sum += static_cast<float>(values[(i / size * times + copy) * size + i % size]);
        expected.push_back(sum);
      }
      const auto outputs = run_operator(*make_sum_heads(heads, times), kernels(), inputs);
      expect_bitwise_equal(outputs[0], tensor_of({tokens, heads * size}, expected, dtype), "sums");
    }
  }
}

TEST(RepeatHeads, GradientsAreTransposes) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Case& c : cases()) {
      if (c.tokens == 0) continue;
      for (const bool repeat : {true, false}) {
        const auto build = [&](World& /*world*/) {
          LinearMap map;
          const int64_t width = c.heads * c.size * (repeat ? 1 : c.times);
          map.x = map.program.add_input("x", {dtype, {c.tokens, width}});
          map.y = map.program.add1(
              repeat ? make_repeat_heads(c.heads, c.times) : make_sum_heads(c.heads, c.times),
              {map.x}, "y");
          map.program.set_outputs({map.y});
          return map;
        };
        check_transpose(1, build, kernels(), 5);
      }
    }
  }
}

TEST(RepeatHeads, ShapeRules) {
  const ValueType x{DType::kBF16, {8, 6}, 0, 3};
  const ValueType inputs[] = {x};
  EXPECT_EQ(make_repeat_heads(2, 4)->infer(inputs)[0], with_last_dim(x, 24));
  EXPECT_EQ(make_sum_heads(3, 2)->infer(inputs)[0], with_last_dim(x, 3));
  EXPECT_EQ(make_sum_heads(3, 2)->attributes(), "heads=3 times=2");
  EXPECT_THROW(make_sum_heads(2, 2)->infer(inputs), UserError);
  const ValueType integers[] = {with_dtype(x, DType::kI32)};
  EXPECT_THROW(make_repeat_heads(2, 2)->infer(integers), UserError);
  EXPECT_THROW(make_repeat_heads(0, 2), UserError);
  EXPECT_THROW(make_repeat_heads(2, 0), UserError);
}

}  // namespace
}  // namespace tessera::testing
