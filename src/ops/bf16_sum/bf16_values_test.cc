#include "ops/bf16_sum/bf16_values.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "core/dtype.h"
#include "core/random.h"

namespace tessera {
namespace {

std::vector<float> random_values(size_t n, uint64_t stream) {
  std::vector<float> values(n);
  fill_normal(values, 5, stream, 1.0F);
  return values;
}

std::byte* bytes(auto& values) {
  return reinterpret_cast<std::byte*>(values.data());
}

TEST(RoundToBf16, InPlaceAndElsewhere) {
  for (const size_t n : {0, 1, 511, 512, 513, 2000}) {
    std::vector<float> values = random_values(n, n);
    std::vector<Bf16> expected;
    for (const float value : values) expected.emplace_back(value);
    std::vector<Bf16> elsewhere(n);
    round_to_bf16(bytes(values), static_cast<int64_t>(n), bytes(elsewhere));
    round_to_bf16(bytes(values), static_cast<int64_t>(n), bytes(values));
    const std::byte* in_place = bytes(values);
    for (size_t i = 0; i < n; ++i) {
      EXPECT_EQ(elsewhere[i].bits, expected[i].bits);
      EXPECT_EQ(std::memcmp(in_place + 2 * i, &expected[i], 2), 0);
    }
  }
}

TEST(SumBf16Parts, AddsInTheOrderOfTheParts) {
  for (const size_t n : {0, 1, 600, 1024}) {
    for (size_t own = 0; own < 4; ++own) {
      std::vector<float> expected(n);
      std::vector<float> sum(n);
      std::vector<Bf16> parts;
      for (size_t p = 0; p < 4; ++p) {
        const std::vector<float> values = random_values(n, 10 + p);
        for (size_t i = 0; i < n; ++i) {
          expected[i] += Bf16(values[i]);
          if (p == own) sum[i] = values[i];
          if (p != own) parts.emplace_back(values[i]);
        }
      }
      std::vector<Bf16> narrow;
      for (const float value : sum) narrow.emplace_back(value);
      sum_bf16_parts(bytes(parts), 4, static_cast<int64_t>(own), std::span(sum));
      EXPECT_EQ(sum, expected);
      sum_bf16_parts(bytes(parts), 4, static_cast<int64_t>(own), std::span(narrow));
      for (size_t i = 0; i < n; ++i) EXPECT_EQ(narrow[i].bits, Bf16(expected[i]).bits);
    }
  }
}

// 1 + many small summands: a sum kept in BF16 would not move from 1.
TEST(SumBf16Parts, AccumulatesInF32) {
  constexpr int64_t kParts = 65;
  std::vector<Bf16> parts(kParts - 1, Bf16(0x1.0p-9F));
  std::vector<float> sum = {1.0F};
  sum_bf16_parts(bytes(parts), kParts, 0, std::span(sum));
  EXPECT_EQ(sum[0], 1.125F);
}

}  // namespace
}  // namespace tessera
