// QuantizeTokens on a GPU against the CPU's, bit by bit.
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "ops/cuda/device_buffer.h"
#include "ops/dequantize/dequantize_testing.h"
#include "ops/float_word.h"
#include "ops/grouped_matmul/grouped_cuda_testing.h"
#include "ops/quantize_tokens/quantize_tokens_kernels.h"
#include "ops/quantize_tokens/quantize_tokens_testing.h"
#include "ops/quantize_tokens/token_blocks.h"
#include "ops/scaled_rows.h"
#include "ops/testing/gpu_test.h"

namespace tessera::cuda {
namespace {

using testing::TokenCodes;

class QuantizeTokensCuda : public testing::GpuTest {};

/// What the GPU makes of x, or of rows that it gathers, and leaves as it was, by its own kernel.
void run(const Tensor& x, TokenScales scales, const std::vector<int64_t>& offsets,
         bool gives_offsets, const TokenCodes& found,
         const testing::GatheredRows* gathered = nullptr) {
  const Tensor& codes = found.codes.get();
  const Tensor& of = found.scales.get();
  DeviceBuffer from(x.num_bytes());
  from.copy_from(x.data);
  const bool is_coded = x.scale.is_scaled();
  const ptrdiff_t scales_at =
      is_coded ? static_cast<std::byte*>(scales_of(x).data) - static_cast<std::byte*>(x.data) : 0;
  DeviceBuffer y(codes.num_bytes());
  y.copy_from(codes.data);
  DeviceBuffer y_scales(of.num_bytes());
  y_scales.copy_from(of.data);
  const DeviceBuffer device_offsets = to_device(offsets);
  const Tensor source = gathered == nullptr ? Tensor{} : gathered->source.get();
  DeviceBuffer device_source(std::max<int64_t>(source ? source.num_bytes() : 0, 4));
  if (source) device_source.copy_from(source.data);
  launch_quantize_tokens(
      {.dtype = x.dtype,
       .x = from.as<void>(),
       .row_scales = reinterpret_cast<const float*>(from.as<std::byte>() + scales_at),
       .columns_of_scale = columns_of_scale(x.scale, x.shape[1]),
       .y = y.as<uint8_t>(),
       .scales = y_scales.as<float>(),
       .offsets = gives_offsets ? device_offsets.as<int64_t>() : nullptr,
       .num_rows = source ? source.shape[0] : x.shape[0],
       .num_columns = x.shape[1],
       .num_groups = static_cast<int>(offsets.size()) - 1,
       .by_block = scales == TokenScales::kBlock,
       .source = source ? device_source.as<int32_t>() : nullptr,
       .top_k = Divider(testing::GatheredRows::kChoices)},
      nullptr);
  check(cudaDeviceSynchronize());
  y.copy_to(codes.data);
  y_scales.copy_to(of.data);
}

void check_values(const Tensor& x, TokenScales scales, const std::vector<int64_t>& offsets) {
  const TokenCodes expected = testing::quantize_tokens(x, scales, offsets);
  const std::vector<ValueType> types = {
      {.dtype = expected.codes.get().dtype, .shape = expected.codes.get().shape},
      {.dtype = expected.scales.get().dtype, .shape = expected.scales.get().shape}};
  for (const bool gives_offsets : {true, false}) {
    if (!gives_offsets && (offsets.size() != 2 || offsets[1] != x.shape[0])) continue;
    const TokenCodes found(types);
    run(x, scales, offsets, gives_offsets, found);
    const std::string what = fmt::format("{} offsets {} by block {}", x.shape.to_string(), offsets,
                                         scales == TokenScales::kBlock);
    const Tensor& codes = found.codes.get();
    for (int64_t i = 0; i < codes.num_elements(); ++i)
      ASSERT_EQ(static_cast<const uint8_t*>(codes.data)[i],
                static_cast<const uint8_t*>(expected.codes.get().data)[i])
          << what << " at " << i / codes.shape[1] << ", " << i % codes.shape[1];
    const auto found_scales = found.scales.get().span<float>();
    const auto expected_scales = expected.scales.get().span<float>();
    for (size_t i = 0; i < found_scales.size(); ++i)
      ASSERT_EQ(word_of_float(found_scales[i]), word_of_float(expected_scales[i]))
          << what << " scale " << i;
  }
}

/// `slack`: rows behind the last group's.
void check_case(const std::vector<int64_t>& counts, int64_t columns, Random& random,
                int64_t slack = 0) {
  const std::vector<int64_t> offsets = testing::ends_of(counts);
  const OwnedTensor x =
      testing::random_tensor(DType::kBF16, {offsets.back() + slack, columns}, random, 10.0);
  for (const TokenScales scales : {TokenScales::kGroup, TokenScales::kBlock})
    check_values(x.get(), scales, offsets);
}

/// Rows of FP8, of as many columns as their scales may have there.
void check_coded(const std::vector<int64_t>& counts, int64_t columns, Random& random) {
  const std::vector<int64_t> offsets = testing::ends_of(counts);
  const OwnedTensor x =
      testing::random_tensor(DType::kBF16, {offsets.back() + 3, columns}, random, 10.0);
  for (const QuantizeSpec& spec : testing::row_specs()) {
    if (columns_of_scale(spec.scale, columns) % QuantizeTokens::kUnit != 0) continue;
    const testing::ScaledTensor coded = testing::quantize(x.get(), spec);
    for (const TokenScales scales : {TokenScales::kGroup, TokenScales::kBlock})
      check_values(coded.tensor, scales, offsets);
  }
}

/// Rows and columns of zeros, rows whose scales are up to 2^(2 * apart) apart, codes that are NaN.
void check_unequal(const std::vector<int64_t>& counts, int64_t columns, int apart, Random& random) {
  const std::vector<int64_t> offsets = testing::ends_of(counts);
  const int64_t num_rows = offsets.back();
  const OwnedTensor x = testing::random_tensor(DType::kBF16, {num_rows, columns}, random, 10.0);
  Bf16* const values = x.get().as<Bf16>();
  for (int64_t row = 0; row < num_rows; ++row) {
    const auto power = static_cast<int>(random.next_below(static_cast<uint64_t>(2 * apart + 1)));
    const float factor = row % 7 == 3 ? 0 : std::ldexp(1.0F, power - apart);
    for (int64_t column = 0; column < columns; ++column) {
      Bf16& value = values[row * columns + column];
      value = Bf16(column % 5 == 2 ? 0 : factor * static_cast<float>(value));
    }
  }
  for (const QuantizeSpec& spec : testing::row_specs()) {
    if (columns_of_scale(spec.scale, columns) % QuantizeTokens::kUnit != 0) continue;
    const testing::ScaledTensor coded = testing::quantize(x.get(), spec);
    const auto codes = static_cast<uint8_t*>(coded.tensor.data);
    for (int i = 0; i < 20; ++i)
      codes[random.next_below(static_cast<uint64_t>(num_rows * columns))] =
          i % 2 == 0 ? 0x7F : 0xFF;
    for (const TokenScales scales : {TokenScales::kGroup, TokenScales::kBlock})
      check_values(coded.tensor, scales, offsets);
  }
}

/// `counts` rows of experts, and two behind them, of 50 tokens in BF16 and in FP8.
void check_gathered(const std::vector<int64_t>& counts, int64_t columns, Random& random) {
  const std::vector<int64_t> offsets = testing::ends_of(counts);
  const OwnedTensor ends = testing::tensor_of_i64({std::ssize(offsets)}, offsets);
  const testing::GatheredRows gathered(offsets.back() + 2, random);
  const OwnedTensor x =
      testing::random_tensor(DType::kBF16, {testing::GatheredRows::kTokens, columns}, random, 10.0);
  const testing::ScaledTensor coded = testing::quantize(x, {});
  for (const TokenScales scales : {TokenScales::kGroup, TokenScales::kBlock}) {
    for (const Tensor& from : {x.get(), coded.tensor}) {
      const TokenCodes expected = testing::run_quantize_tokens(
          QuantizeTokens(scales, true), {from, ends, gathered.source, gathered.row_of});
      const TokenCodes found(std::vector<ValueType>{
          {.dtype = expected.codes.get().dtype, .shape = expected.codes.get().shape},
          {.dtype = expected.scales.get().dtype, .shape = expected.scales.get().shape}});
      run(from, scales, offsets, true, found, &gathered);
      for (const auto& [a, b] : {std::pair{found.codes.get(), expected.codes.get()},
                                 std::pair{found.scales.get(), expected.scales.get()}})
        EXPECT_EQ(std::memcmp(a.data, b.data, b.num_bytes()), 0)
            << fmt::format("{} by {} {}", counts, columns, dtype_name(from.dtype));
    }
  }
}

TEST_F(QuantizeTokensCuda, TinyGroupsThatAreGathered) {
  Random random(11, 1);
  check_gathered({3, 0, 130}, 80, random);
}

TEST_F(QuantizeTokensCuda, GatheredRowsGiveTheHostsBits) {
  Random random(12, 1);
  check_gathered({1}, 16, random);
  check_gathered({0, 700, 129, 2000}, 272, random);
  check_gathered({5000, 1}, 144, random);
}

TEST_F(QuantizeTokensCuda, TinyGroupsOfFp8) {
  Random random(9, 1);
  check_coded({3, 0, 130}, 80, random);
}

TEST_F(QuantizeTokensCuda, RowsOfFp8GiveTheHostsBits) {
  Random random(10, 1);
  check_coded({1}, 16, random);
  check_coded({0, 700, 129, 2000}, 272, random);
}

TEST_F(QuantizeTokensCuda, RowsOfFp8WithScalesFarApartGiveTheHostsBits) {
  Random random(13, 1);
  for (const int apart : {0, 3, 8, 20, 50}) {
    SCOPED_TRACE(apart);
    check_unequal({0, 700, 129, 2000}, 272, apart, random);
    check_unequal({5, 300}, 128, apart, random);
  }
}

TEST_F(QuantizeTokensCuda, TinyGroups) {
  Random random(5, 1);
  check_case({3, 0, 130}, 80, random, 2);
}

TEST_F(QuantizeTokensCuda, GivesTheHostsBits) {
  Random random(6, 1);
  check_case({1}, 16, random);
  check_case({128}, 64, random);
  check_case({5000}, 144, random);  // more than a cluster keeps
  check_case({300, 0, 128, 1, 127, 0, 129}, 208, random, 5);
  check_case({0, 3000, 2, 2}, 48, random, 400);
  check_case(std::vector<int64_t>(40, 17), 32, random);
  for (int i = 0; i < 20; ++i) {
    std::vector<int64_t> counts;
    const uint64_t groups = 1 + random.next_below(9);
    for (uint64_t e = 0; e < groups; ++e)
      counts.push_back(static_cast<int64_t>(random.next_below(2) * random.next_below(900)));
    counts.back() += 1;
    check_case(counts, 16 * (1 + static_cast<int64_t>(random.next_below(12))), random,
               static_cast<int64_t>(random.next_below(3)));
  }
}

TEST_F(QuantizeTokensCuda, NonFiniteNumbers) {
  Random random(8, 1);
  const OwnedTensor x = testing::random_tensor(DType::kBF16, {135, 16}, random);
  x.get().as<Bf16>()[5] = Bf16(std::numeric_limits<float>::infinity());
  x.get().as<Bf16>()[6] = Bf16(std::nanf(""));
  for (const TokenScales scales : {TokenScales::kGroup, TokenScales::kBlock})
    check_values(x, scales, {0, 130, 135});
}

}  // namespace
}  // namespace tessera::cuda
