#include "core/fp8.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <vector>

namespace tessera {
namespace {

std::vector<uint8_t> read_casts(const std::string& name) {
  std::ifstream file(std::filesystem::path(TESSERA_TEST_DATA) / "numerics" / name,
                     std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Every BF16 number within the range, as ml_dtypes casts it; beyond it, the largest.
template <typename Element>
void check_casts(const std::string& name, float largest) {
  const std::vector<uint8_t> expected = read_casts(name);
  ASSERT_EQ(expected.size(), 65536U);
  for (uint32_t bits = 0; bits < expected.size(); ++bits) {
    const auto value = std::bit_cast<float>(bits << 16);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(static_cast<float>(Element(value)))) << bits;
    } else if (std::abs(value) > largest) {
      EXPECT_EQ(static_cast<float>(Element(value)), std::copysign(largest, value)) << bits;
    } else {
      EXPECT_EQ(Element(value).bits, expected[bits]) << value;
    }
  }
}

TEST(Fp8, CastsAsOthersDo) {
  check_casts<E4m3>("bf16_to_e4m3fn.bin", kLargestE4m3);
  check_casts<E5m2>("bf16_to_e5m2.bin", kLargestE5m2);
}

/// Every code but those of NaN and infinity is the nearest to what it stands for, and so is what
/// lies just beside it; what lies halfway takes the even one.
template <typename Element>
void check_codes(uint8_t largest) {
  for (uint8_t code = 0; code < largest; ++code) {
    Element low;
    Element high;
    low.bits = code;
    high.bits = code + 1;
    const float a = low;
    const float b = high;
    EXPECT_LT(a, b);
    EXPECT_EQ(Element(a).bits, code);
    EXPECT_EQ(Element(-b).bits, 0x80 | (code + 1));
    const float middle = (a + b) / 2;
    EXPECT_EQ(Element(middle).bits, code % 2 == 0 ? code : code + 1);
    EXPECT_EQ(Element(std::nextafter(middle, 0.0F)).bits, code);
    EXPECT_EQ(Element(std::nextafter(middle, b)).bits, code + 1);
  }
}

TEST(Fp8, RoundsToNearestEven) {
  check_codes<E4m3>(0x7e);
  check_codes<E5m2>(0x7b);
}

TEST(Fp8, SaturatesAndKeepsNan) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(static_cast<float>(E4m3(kInfinity)), 448.0F);
  EXPECT_EQ(static_cast<float>(E4m3(-1e9F)), -448.0F);
  EXPECT_EQ(static_cast<float>(E5m2(kInfinity)), 57344.0F);
  EXPECT_TRUE(std::isnan(static_cast<float>(E4m3(std::nanf("")))));
  EXPECT_TRUE(std::isnan(static_cast<float>(E5m2(std::nanf("")))));
  E5m2 infinite;
  infinite.bits = 0xfc;
  EXPECT_EQ(static_cast<float>(infinite), -kInfinity);
}

}  // namespace
}  // namespace tessera
