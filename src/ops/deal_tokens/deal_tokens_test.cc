#include "ops/deal_tokens/deal_tokens.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ops/testing/op_test.h"
#include "ops/testing/transpose.h"

namespace tessera::testing {
namespace {

KernelTable kernels() {
  KernelTable table;
  add_deal_tokens_cpu(table);
  return table;
}

std::vector<Zigzag> deals() {
  return {{.num_rows = 1, .row_length = 5},
          {.num_rows = 3, .row_length = 4, .ring = 1},
          {.num_rows = 1, .row_length = 4, .ring = 2},
          {.num_rows = 3, .row_length = 12, .ring = 2},
          {.num_rows = 2, .row_length = 18, .ring = 3},
          {.num_rows = 0, .row_length = 8, .ring = 2}};
}

/// The tokens' numbers in the ring's order, by the definition of a zigzag.
std::vector<int64_t> dealt(const Zigzag& deal) {
  std::vector<int64_t> tokens;
  if (deal.ring == 1) {
    for (int64_t token = 0; token < deal.num_tokens(); ++token) tokens.push_back(token);
    return tokens;
  }
  const int64_t chunk = deal.row_length / (2 * deal.ring);
  for (int64_t rank = 0; rank < deal.ring; ++rank) {
    for (int64_t row = 0; row < deal.num_rows; ++row) {
      for (const int64_t part : {rank, 2 * deal.ring - 1 - rank}) {
        for (int64_t i = 0; i < chunk; ++i)
          tokens.push_back(row * deal.row_length + part * chunk + i);
      }
    }
  }
  return tokens;
}

TEST(DealTokens, GivesTheOrderOfTheRingAndBack) {
  for (const Zigzag& deal : deals()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      constexpr int64_t kWidth = 3;
      std::vector<float> in_order;
      std::vector<float> in_ring;
      for (int64_t token = 0; token < deal.num_tokens(); ++token)
        for (int64_t i = 0; i < kWidth; ++i) in_order.push_back(static_cast<float>(3 * token + i));
      for (const int64_t token : dealt(deal))
        for (int64_t i = 0; i < kWidth; ++i) in_ring.push_back(static_cast<float>(3 * token + i));
      const Shape shape = {deal.num_tokens(), kWidth};
      const auto out = run_operator(*make_deal_tokens(deal), kernels(),
                                    list_inputs(TestInput{tensor_of(shape, in_order, dtype)}));
      expect_bitwise_equal(out[0], tensor_of(shape, in_ring, dtype), "dealt");
      const auto back = run_operator(*make_collect_tokens(deal), kernels(),
                                     list_inputs(TestInput{tensor_of(shape, in_ring, dtype)}));
      expect_bitwise_equal(back[0], tensor_of(shape, in_order, dtype), "collected");
    }
  }
}

TEST(DealTokens, GradientsAreTransposes) {
  for (const Zigzag& deal : deals()) {
    if (deal.num_rows == 0) continue;
    for (const bool deals : {true, false}) {
      const auto build = [&](World& /*world*/) {
        LinearMap map;
        map.x = map.program.add_input("x", {DType::kF32, {deal.num_tokens(), 2}});
        map.y = map.program.add1(deals ? make_deal_tokens(deal) : make_collect_tokens(deal),
                                 {map.x}, "y");
        map.program.set_outputs({map.y});
        return map;
      };
      check_transpose(1, build, kernels(), 5);
    }
  }
}

TEST(DealTokens, ShapeRule) {
  const Zigzag deal{.num_rows = 2, .row_length = 8, .ring = 2};
  const ValueType x{DType::kBF16, {16, 3}};
  EXPECT_EQ(make_deal_tokens(deal)->infer(std::vector{x})[0], x);
  EXPECT_EQ(make_deal_tokens(deal)->attributes(), "rows=2x8 ring=2");
  EXPECT_THAT(([&] {
                make_collect_tokens(deal)->infer(std::vector<ValueType>{{DType::kF32, {12, 3}}});
              }),
              ::testing::ThrowsMessage<UserError>(
                  ::testing::HasSubstr("takes f32 or bf16 of 16 tokens, got f32 [12, 3]")));
  EXPECT_THROW(make_deal_tokens({.num_rows = 2, .row_length = 6, .ring = 2}), UserError);
}

}  // namespace
}  // namespace tessera::testing
