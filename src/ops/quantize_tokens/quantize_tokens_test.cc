#include "ops/quantize_tokens/quantize_tokens.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "ops/dequantize/dequantize_testing.h"
#include "ops/quantize_tokens/quantize_tokens_testing.h"
#include "ops/quantize_tokens/token_blocks.h"
#include "ops/round_values/round_values.h"
#include "ops/testing/op_test.h"

namespace tessera {
namespace {

using testing::quantize_tokens;
using testing::TokenCodes;

/// What RoundValues makes of x down the columns of each group.
OwnedTensor round_values(const Tensor& x, TokenScales scales, const std::vector<int64_t>& offsets) {
  const RoundValues op({.cast = {.length = scales == TokenScales::kBlock ? kTokenBlock : 0},
                        .sum_dim = 0,
                        .offsets = true});
  OwnedTensor y(x.dtype, x.shape);
  const OwnedTensor ends = testing::tensor_of_i64({std::ssize(offsets)}, offsets);
  KernelTable table;
  add_round_values_cpu(table);
  const std::vector<Tensor> inputs = {x, ends.get()};
  const std::vector<Tensor> outputs = {y.get()};
  table.find(RoundValues::kName)->second(op, {.inputs = inputs, .outputs = outputs});
  return y;
}

void check_case(DType dtype, const std::vector<int64_t>& counts, int64_t columns,
                TokenScales scales) {
  Random random(3, 1);
  const std::vector<int64_t> offsets = testing::ends_of(counts);
  const int64_t rows = offsets.back();
  const OwnedTensor x = testing::random_tensor(dtype, {rows, columns}, random, 3.0);
  const TokenCodes found = quantize_tokens(x.get(), scales, offsets);
  const std::vector<double> truth =
      testing::to_doubles(round_values(x.get(), scales, offsets).get());
  const int64_t width = found.codes.get().shape[1];
  ASSERT_EQ(width, num_token_blocks(rows, std::ssize(counts)) * kTokenBlock);
  for (int64_t e = 0; e < std::ssize(counts); ++e) {
    const int64_t first = first_token_block(offsets[e], e) * kTokenBlock;
    const int64_t filled = token_blocks_of(counts[e]) * kTokenBlock;
    ASSERT_LE(first + filled, width);
    for (int64_t c = 0; c < columns; ++c) {
      for (int64_t t = 0; t < filled; ++t) {
        const double expected = t < counts[e] ? truth[(offsets[e] + t) * columns + c] : 0.0;
        ASSERT_EQ(found.value(scales, e, first + t, c), expected)
            << "group " << e << " token " << t << " column " << c;
      }
    }
  }
}

TEST(QuantizeTokens, StandsForWhatRoundValuesGives) {
  for (const TokenScales scales : {TokenScales::kGroup, TokenScales::kBlock}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      check_case(dtype, {5}, 3, scales);
      check_case(dtype, {128}, 1, scales);
      check_case(dtype, {0, 1, 127, 0, 128, 129, 300, 0}, 20, scales);
      check_case(dtype, {1, 1, 1}, 16, scales);
      check_case(dtype, {0, 0}, 4, scales);
    }
  }
}

/// Of rows of FP8 it makes what it makes of the values that they stand for.
TEST(QuantizeTokens, TakesRowsOfFp8) {
  Random random(5, 1);
  const std::vector<int64_t> offsets = testing::ends_of({0, 3, 130, 0, 128});
  for (const QuantizeSpec& spec : testing::row_specs()) {
    const OwnedTensor x = testing::random_tensor(DType::kBF16, {offsets.back(), 24}, random, 10.0);
    const testing::ScaledTensor coded = testing::quantize(x.get(), spec);
    const OwnedTensor values = testing::dequantize(coded.tensor, DType::kBF16);
    for (const TokenScales scales : {TokenScales::kGroup, TokenScales::kBlock}) {
      const TokenCodes found = quantize_tokens(coded.tensor, scales, offsets);
      const TokenCodes expected = quantize_tokens(values.get(), scales, offsets);
      EXPECT_EQ(std::memcmp(found.codes.get().data, expected.codes.get().data,
                            found.codes.get().num_bytes()),
                0);
      EXPECT_EQ(std::memcmp(found.scales.get().data, expected.scales.get().data,
                            found.scales.get().num_bytes()),
                0);
    }
  }
}

/// As those of a rank's experts to which no token comes.
TEST(QuantizeTokens, TakesNoRowsOfFp8) {
  Random random(5, 1);
  const std::vector<int64_t> offsets = testing::ends_of({0, 0, 0});
  for (const QuantizeSpec& spec : testing::row_specs()) {
    const OwnedTensor x = testing::random_tensor(DType::kBF16, {0, 24}, random, 10.0);
    const testing::ScaledTensor coded = testing::quantize(x.get(), spec);
    for (const TokenScales scales : {TokenScales::kGroup, TokenScales::kBlock})
      EXPECT_NO_THROW(quantize_tokens(coded.tensor, scales, offsets));
  }
}

TEST(QuantizeTokens, GathersTheRowsThatPermuteMakes) {
  Random random(6, 1);
  const std::vector<int64_t> offsets = testing::ends_of({0, 3, 130, 0, 128});
  const OwnedTensor ends = testing::tensor_of_i64({std::ssize(offsets)}, offsets);
  const testing::GatheredRows gathered(offsets.back() + 2, random);
  const int64_t tokens = testing::GatheredRows::kTokens;
  for (const TokenScales scales : {TokenScales::kGroup, TokenScales::kBlock}) {
    const QuantizeTokens op(scales, true);
    const auto check = [&](const Tensor& x, const Tensor& rows) {
      const TokenCodes found =
          testing::run_quantize_tokens(op, {x, ends, gathered.source, gathered.row_of});
      const TokenCodes expected = quantize_tokens(rows, scales, offsets);
      for (const auto& [a, b] : {std::pair{found.codes.get(), expected.codes.get()},
                                 std::pair{found.scales.get(), expected.scales.get()}})
        EXPECT_EQ(std::memcmp(a.data, b.data, b.num_bytes()), 0) << dtype_name(x.dtype);
    };
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const OwnedTensor x = testing::random_tensor(dtype, {tokens, 24}, random, 10.0);
      check(x, gathered.rows_of(x));
    }
    const OwnedTensor x = testing::random_tensor(DType::kBF16, {tokens, 24}, random, 10.0);
    const testing::ScaledTensor coded = testing::quantize(x, {});
    check(coded.tensor, gathered.rows_of(testing::dequantize(coded.tensor, DType::kBF16)));
  }
}

TEST(QuantizeTokens, RefusesMapsThatDoNotFit) {
  const QuantizeTokens op(TokenScales::kGroup, true);
  const ValueType x{.dtype = DType::kBF16, .shape = {50, 32}};
  const ValueType offsets{.dtype = DType::kI64, .shape = {4}};
  const ValueType source{.dtype = DType::kI32, .shape = {150}};
  const ValueType row_of{.dtype = DType::kI32, .shape = {50, 3}};
  EXPECT_EQ(op.infer(std::vector{x, offsets, source, row_of})[0].to_string(), "e4m3 [32, 512]");
  EXPECT_EQ(op.with_gather(QuantizeTokens::kX), nullptr);
  EXPECT_THROW(op.infer(std::vector{x, offsets}), UserError);
  EXPECT_THROW(op.infer(std::vector{x, offsets, row_of, source}), UserError);
  ValueType others = row_of;
  others.shape = {49, 3};
  EXPECT_THROW(op.infer(std::vector{x, offsets, source, others}), UserError);
}

/// Groups of any sizes lie behind each other.
TEST(TokenBlocks, AreOfOneGroup) {
  Random random(4, 1);
  for (int i = 0; i < 200; ++i) {
    int64_t offset = 0;
    int64_t end = 0;
    const int64_t groups = 1 + static_cast<int64_t>(random.next_below(9));
    for (int64_t e = 0; e < groups; ++e) {
      const auto count = static_cast<int64_t>(random.next_below(2) * random.next_below(400));
      ASSERT_GE(first_token_block(offset, e), end);
      if (count > 0) end = first_token_block(offset, e) + token_blocks_of(count);
      offset += count;
    }
    ASSERT_LE(end, num_token_blocks(offset, groups));
  }
}

TEST(QuantizeTokens, ZerosAndNonFiniteNumbers) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const OwnedTensor x = testing::tensor_of({2, 3}, {0, kInfinity, std::nanf(""), 0, 2, 2});
  const TokenCodes found = quantize_tokens(x.get(), TokenScales::kGroup, {0, 2});
  EXPECT_EQ(found.scales.get().as<float>()[0], 0x1p-108F);
  EXPECT_EQ(found.value(TokenScales::kGroup, 0, 0, 0), 0);
  EXPECT_FALSE(std::isfinite(found.value(TokenScales::kGroup, 0, 1, 1)));
  EXPECT_TRUE(std::isnan(found.value(TokenScales::kGroup, 0, 0, 2)));
  EXPECT_NEAR(found.value(TokenScales::kGroup, 0, 1, 2), 2, 0.1);
  EXPECT_EQ(static_cast<float>(found.codes.get().as<E4m3>()[kTokenBlock + 2]), 0);  // filled up
}

TEST(QuantizeTokens, RefusesWhatItCannotDo) {
  const OperatorPtr op = make_quantize_tokens(TokenScales::kBlock);
  const ValueType x{.dtype = DType::kBF16, .shape = {200, 32}};
  const ValueType offsets{.dtype = DType::kI64, .shape = {4}};
  const auto types = op->infer(std::vector{x, offsets});
  EXPECT_EQ(types[0].to_string(), "e4m3 [32, 512]");
  EXPECT_EQ(types[1].to_string(), "f32 [4, 32]");
  EXPECT_EQ(op->infer(std::vector{x})[0].to_string(), "e4m3 [32, 256]");
  EXPECT_EQ(make_quantize_tokens(TokenScales::kGroup)->infer(std::vector{x, offsets})[1].shape,
            (Shape{3, 32}));
  ValueType ragged = x;
  ragged.ragged_dim = 0;
  ragged.extent = Extent(ValueId(7));
  EXPECT_THROW(op->infer(std::vector{ragged}), UserError);
  EXPECT_THROW(op->infer(std::vector{offsets}), UserError);
  EXPECT_THROW(op->infer(std::vector{x, x}), UserError);
}

}  // namespace
}  // namespace tessera
