// Products that gather their rows against permute and the product of its rows, bit by bit.
#include <gtest/gtest.h>

#include "ops/add/add.h"
#include "ops/grouped_matmul/gather_testing.h"

namespace tessera {
namespace {

using testing::GatherCase;

KernelTable kernels() {
  KernelTable table;
  add_add_cpu(table);
  add_route_map_cpu(table);
  add_permute_cpu(table);
  add_grouped_matmul_cpu(table);
  return table;
}

void check(const GatherCase& c, uint64_t seed) {
  for (const DType dtype : {DType::kF32, DType::kBF16})
    testing::expect_bits_of_permute(c, dtype, seed, Backend(kernels()));
}

TEST(GatheredProducts, GiveTheBitsOfPermuteAndProduct) {
  uint64_t seed = 0;
  for (const int64_t num_tokens : {0, 1, 5, 130}) {
    for (const int64_t slack : {0, 7}) {
      check({num_tokens, slack, {8, 8, 8, 8}, 2, 24}, ++seed);
      check({num_tokens, slack, {5, 17, 1}, 1, 9}, ++seed);
      check({num_tokens, slack, {16, 7, 33}, 3, 40, 16}, ++seed);
      check({num_tokens, slack, {16, 16, 16}, 3, 8, 1, 1}, ++seed);
    }
  }
}

TEST(GatheredProducts, RefuseWhatDoesNotFit) {
  EXPECT_THROW(make_grouped_matmul({{8, 8}, GroupedSide::kIn, true}), UserError);
  const auto op = make_grouped_matmul({{8, 4}, GroupedSide::kOut, true});
  const GroupedMatmulWgrad wgrad(ExpertSizes({8, 4}, "test"), true);
  const ValueType x{.dtype = DType::kF32, .shape = {5, 16}};
  const ValueType weight{.dtype = DType::kF32, .shape = {12, 16}};
  const ValueType offsets{.dtype = DType::kI64, .shape = {3}};
  const ValueType source{.dtype = DType::kI32, .shape = {10}};
  const ValueType row_of{.dtype = DType::kI32, .shape = {5, 2}};
  const ValueType narrow{.dtype = DType::kF32, .shape = {10, 8}};
  const auto infer = [&](std::vector<ValueType> types) { return op->infer(types)[0]; };
  EXPECT_EQ(infer({x, weight, offsets, source, row_of}).shape, (Shape{10, 8}));
  EXPECT_THROW(infer({x, weight, offsets}), UserError);
  EXPECT_THROW(infer({x, weight, offsets, with_dtype(source, DType::kI64), row_of}), UserError);
  EXPECT_THROW(infer({x, weight, offsets, source, with_dtype(row_of, DType::kF32)}), UserError);
  EXPECT_THROW(infer({with_dtype(x, DType::kBF16), weight, offsets, source, row_of}), UserError);
  EXPECT_THROW(infer({{DType::kF32, {4, 16}}, weight, offsets, source, row_of}), UserError);
  const auto infer_grad = [&](std::vector<ValueType> types) { return wgrad.infer(types)[0]; };
  EXPECT_EQ(infer_grad({narrow, x, offsets, source, row_of}).shape, (Shape{12, 16}));
  EXPECT_THROW(infer_grad({narrow, x, offsets}), UserError);
  EXPECT_THROW(infer_grad({{DType::kF32, {9, 8}}, x, offsets, source, row_of}), UserError);
}

TEST(GatheredProducts, CostTheirRowsArithmeticAndTheTokensBytes) {
  const auto op = make_grouped_matmul({{8, 8}, GroupedSide::kOut, true});
  const std::vector<ValueType> inputs{{.dtype = DType::kF32, .shape = {5, 16}},
                                      {.dtype = DType::kF32, .shape = {16, 16}},
                                      {.dtype = DType::kI64, .shape = {3}},
                                      {.dtype = DType::kI32, .shape = {10}},
                                      {.dtype = DType::kI32, .shape = {5, 2}}};
  const Cost cost = op->cost(inputs, op->infer(inputs));
  EXPECT_EQ(cost.flops, 2.0 * 10 * 16 * 8);
  EXPECT_EQ(cost.bytes, 4.0 * (5 * 16 + 16 * 16 + 10 + 10 * 8) + 8 * 3);
  EXPECT_EQ(op->attributes(), "out experts=2x8 gather");
}

}  // namespace
}  // namespace tessera
