#include "core/nonfinite.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "core/saturating.h"

namespace tessera {
namespace {

template <typename T>
int64_t count(const std::vector<T>& values, DType dtype) {
  return count_nonfinite(std::as_bytes(std::span(values)), dtype);
}

TEST(NonFinite, CountsNanAndInfinityOfEveryFloat) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kMost = std::numeric_limits<float>::max();
  EXPECT_EQ(count<float>({0, -0.0F, 1, kMost, -kMost, 1e-45F}, DType::kF32), 0);
  EXPECT_EQ(count<float>({kNan, 1, kInfinity, -kInfinity, -kNan}, DType::kF32), 4);
  EXPECT_EQ(count<double>({1e308, std::nan(""), -HUGE_VAL}, DType::kF64), 2);
  // One, the largest finite number, infinity, NaN, the same with a sign.
  EXPECT_EQ(count<uint16_t>({0x3F80, 0x7F7F, 0x7F80, 0x7FC0, 0xFF80, 0xFF81}, DType::kBF16), 4);
  EXPECT_EQ(count<uint16_t>({0x3C00, 0x7BFF, 0x7C00, 0x7E00, 0xFC00, 0xFC01}, DType::kF16), 4);
  EXPECT_EQ(count<uint16_t>({0xFFFF}, DType::kU16), 0);
  EXPECT_EQ(count<int64_t>({-1}, DType::kI64), 0);
}

TEST(NonFinite, ReadsBytesThatAreNotAligned) {
  const std::vector<float> values = {0, std::numeric_limits<float>::infinity(), 1};
  std::vector<std::byte> bytes(sizeof(float) * 3 + 1);
  std::memcpy(bytes.data() + 1, values.data(), sizeof(float) * 3);
  EXPECT_EQ(count_nonfinite(std::span(bytes).subspan(1), DType::kF32), 1);
}

TEST(NonFinite, NamesTheFirstTensorAndCountsAll) {
  NonFiniteTensors tensors;
  tensors.add("a", 0);
  EXPECT_TRUE(tensors.empty());
  tensors.add("b", 1);
  EXPECT_EQ(tensors.describe(), "the tensor 'b' has 1 element that is NaN or infinite");
  tensors.add("a", 4);
  tensors.add("b", 2);
  EXPECT_EQ(tensors.num_tensors(), 2);
  EXPECT_EQ(tensors.describe(),
            "the tensor 'b' has 3 elements that are NaN or infinite, and so have 1 other (7 "
            "elements in all)");
}

TEST(Saturating, StaysAtTheLargest) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  EXPECT_EQ((Saturating(6) * 7 + 1).value(), 43);
  EXPECT_EQ((Saturating(1LL << 32) * (1LL << 32)).value(), kMost);
  EXPECT_EQ((Saturating(1LL << 32) * (1LL << 32) * 0).value(), 0);
  EXPECT_EQ((Saturating(kMost) + 1).value(), kMost);
  EXPECT_EQ((Saturating(12) / 5).value(), 2);
}

}  // namespace
}  // namespace tessera
