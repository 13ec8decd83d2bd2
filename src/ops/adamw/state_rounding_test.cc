#include "ops/adamw/state_rounding.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/dtype.h"
#include "core/random.h"

namespace tessera {
namespace {

uint32_t word_of(float value) {
  return std::bit_cast<uint32_t>(value);
}

float value_of(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16U);
}

TEST(StateRounding, GoesToOneOfTheNeighbours) {
  Random random(1, 1);
  for (int i = 0; i < 100'000; ++i) {
    const auto value =
        static_cast<float>(random.next_normal() * std::exp(10 * random.next_normal()));
    const auto bits = static_cast<uint32_t>(random.next_below(65536));
    const float rounded = value_of(round_stochastically(word_of(value), bits));
    const float below = value_of(static_cast<uint16_t>(word_of(value) >> 16U));
    const float above = value_of(static_cast<uint16_t>((word_of(value) >> 16U) + 1));
    ASSERT_TRUE(rounded == below || (rounded == above && value != below)) << value;
  }
}

TEST(StateRounding, TakesTheUpperNeighbourAsOftenAsItsDistanceSays) {
  for (const uint32_t lower : {0U, 1U, 0x4000U, 0x8000U, 0xffffU}) {
    const uint32_t word = word_of(-3.0F) | lower;
    uint32_t ups = 0;
    for (uint32_t bits = 0; bits < 65536; ++bits)
      ups += round_stochastically(word, bits) != static_cast<uint16_t>(word >> 16U) ? 1 : 0;
    EXPECT_EQ(ups, lower);
  }
}

TEST(StateRounding, KeepsWhatIsNotFinite) {
  for (const uint32_t bits : {0U, 0xffffU}) {
    const float infinity = std::numeric_limits<float>::infinity();
    EXPECT_EQ(value_of(round_stochastically(word_of(infinity), bits)), infinity);
    EXPECT_EQ(value_of(round_stochastically(word_of(-infinity), bits)), -infinity);
    for (const uint32_t nan : {0x7f800001U, 0x7fc00000U, 0x7fffffffU, 0xffffffffU})
      EXPECT_TRUE(std::isnan(value_of(round_stochastically(nan, bits)))) << nan;
  }
}

/// Of elements that differ in one input alone, each of the three roundings takes all 16 bits, and
/// no two of them together.
TEST(StateRounding, BitsOfElementsAreIndependent) {
  constexpr int kCount = 1 << 16;
  Random random(7, 2);
  for (int varied = 0; varied < 5; ++varied) {
    double means[3] = {0, 0, 0};
    double products[3] = {0, 0, 0};
    for (int i = 0; i < kCount; ++i) {
      uint32_t in[5] = {17, word_of(0.25F), word_of(-0.5F), word_of(1e-4F), word_of(0.02F)};
      // What is kept as BF16 differs in its upper half alone.
      in[varied] = varied == 0   ? static_cast<uint32_t>(i)
                   : varied == 1 ? word_of(static_cast<float>(random.next_normal()))
                                 : static_cast<uint32_t>(i) << 16U;
      const uint32_t bits = rounding_bits(in[0], in[1], in[2], in[3], in[4]);
      const double x[3] = {first_moment_bits(bits) / 65536.0 - 0.5,
                           second_moment_bits(bits) / 65536.0 - 0.5,
                           weight_bits(bits) / 65536.0 - 0.5};
      for (int k = 0; k < 3; ++k) {
        means[k] += x[k] / kCount;
        products[k] += 12 * x[k] * x[(k + 1) % 3] / kCount;
      }
    }
    // Six standard deviations of uniform numbers.
    for (const double mean : means)
      EXPECT_NEAR(mean, 0, 6 * std::sqrt(1.0 / 12 / kCount)) << varied;
    for (const double product : products) EXPECT_NEAR(product, 0, 6 / std::sqrt(kCount)) << varied;
  }
}

TEST(StateRounding, HalvesTellTheWholeExceptHalfway) {
  Random random(3, 3);
  for (int i = 0; i < 200'000; ++i) {
    // Every lower half comes, among them the halfway one with even and odd upper halves.
    const auto upper = static_cast<uint32_t>(random.next_below(0x7f80));
    const uint32_t sign = i % 2 == 0 ? 0U : 0x80000000U;
    const uint32_t word = sign | upper << 16U | static_cast<uint32_t>(i % 65536);
    const uint32_t near = leave_halfway(word);
    const Bf16 rounded(std::bit_cast<float>(near));
    ASSERT_EQ(rounded.bits, Bf16(std::bit_cast<float>(word)).bits) << word;
    ASSERT_EQ(join_halves(rounded.bits, static_cast<uint16_t>(near & 0xffffU)), near) << word;
    if (word % 65536 == 0x8000) {
      ASSERT_LE(std::max(near, word) - std::min(near, word), 1U);
    } else {
      ASSERT_EQ(near, word);
    }
  }
}

TEST(StateRounding, Of24BitsIsRightOnAverage) {
  // Around the halfway of even and odd upper halves, on which nothing may stay.
  for (const uint32_t upper : {0x3f800000U, 0xbf810000U}) {
    for (uint32_t lower = 0x7e00; lower <= 0x8200; lower += 0x37) {
      const uint32_t word = upper | lower;
      double sum = 0;
      for (uint32_t random = 0; random < 0x200; ++random) {
        const uint32_t kept = round_to_24_bits(word, random);
        ASSERT_EQ(kept & 0xffU, 0U);
        ASSERT_NE(kept & 0xffffU, 0x8000U);
        const Bf16 weight(std::bit_cast<float>(kept));
        const auto remainder = remainder_of<uint8_t>(kept);
        ASSERT_EQ(join_halves(weight.bits, lower_half(remainder)), kept);
        sum += static_cast<double>(kept) - static_cast<double>(word);
      }
      EXPECT_EQ(sum, 0) << word;
    }
  }
  EXPECT_EQ(round_to_24_bits(word_of(std::numeric_limits<float>::infinity()), 0x1ff), 0x7f800000U);
  for (const uint32_t nan : {0x7f800001U, 0xffffffffU, 0x7fc08000U})
    EXPECT_TRUE(std::isnan(std::bit_cast<float>(round_to_24_bits(nan, 0x1ff)))) << nan;
}

TEST(StateRounding, Nearest24BitsKeepTheWeight) {
  Random random(4, 4);
  for (uint32_t i = 0; i < 200'000; ++i) {
    const auto upper = static_cast<uint32_t>(random.next_below(0x7f00));
    const uint32_t word = (i % 2 == 0 ? 0U : 0x80000000U) | upper << 16U | i % 65536;
    const uint32_t kept = nearest_24_bits(word);
    const float before = std::bit_cast<float>(word);
    ASSERT_EQ(Bf16(std::bit_cast<float>(kept)).bits, Bf16(before).bits) << word;
    ASSERT_LE(std::max(kept, word) - std::min(kept, word), 0x100U) << word;
    ASSERT_EQ(nearest_24_bits(kept), kept);
    const Bf16 weight(before);
    ASSERT_EQ(join_halves(weight.bits, lower_half(remainder_of<uint8_t>(kept))), kept);
  }
}

}  // namespace
}  // namespace tessera
