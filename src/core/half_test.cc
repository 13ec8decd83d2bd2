#include "core/half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <vector>

namespace tessera {
namespace {

std::vector<uint16_t> read_codes() {
  std::ifstream file(std::filesystem::path(TESSERA_TEST_DATA) / "numerics" / "f32_to_f16.bin",
                     std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  std::vector<uint16_t> codes(bytes.size() / sizeof(uint16_t));
  std::memcpy(codes.data(), bytes.data(), bytes.size());
  return codes;
}

/// torch 2.11 and numpy 2.4 cast these alike: what lies halfway between neighbours from 2^-27 to
/// beyond the largest half, and words from all over F32.
TEST(Half, CastsAsTorchDoes) {
  constexpr uint32_t kHalfway = 45056;
  const std::vector<uint16_t> codes = read_codes();
  ASSERT_EQ(codes.size(), 65536U);
  for (uint32_t i = 0; i < codes.size(); ++i) {
    const uint32_t word = i < kHalfway ? 0x32001000U + i * 0x2000U : (i - kHalfway) * 2654435761U;
    const auto value = std::bit_cast<float>(word);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(static_cast<float>(Half(value)))) << word;
    } else {
      EXPECT_EQ(Half(value).bits, codes[i]) << value;
    }
  }
}

TEST(Half, EveryCodeIsTheNearestToItsValue) {
  for (uint32_t code = 0; code < 65536; ++code) {
    const Half half = std::bit_cast<Half>(static_cast<uint16_t>(code));
    const auto value = static_cast<float>(half);
    if (std::isnan(value)) {
      EXPECT_GT(code & 0x7fffU, 0x7c00U);
    } else {
      EXPECT_EQ(Half(value).bits, code);
    }
  }
}

TEST(Half, OverflowsAndUnderflows) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(static_cast<float>(Half(65504.0F)), 65504.0F);
  EXPECT_EQ(static_cast<float>(Half(65519.99F)), 65504.0F);
  EXPECT_EQ(static_cast<float>(Half(65520.0F)), kInfinity);
  EXPECT_EQ(static_cast<float>(Half(-1e30F)), -kInfinity);
  EXPECT_EQ(static_cast<float>(Half(0x1p-24F)), 0x1p-24F);
  EXPECT_EQ(static_cast<float>(Half(0x1p-25F)), 0.0F);
  EXPECT_EQ(static_cast<float>(Half(0x1.8p-25F)), 0x1p-24F);
}

}  // namespace
}  // namespace tessera
