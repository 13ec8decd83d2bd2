#include "ops/adamw/moment_code.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/memory.h"
#include "core/random.h"
#include "ops/adamw/moment_blocks.h"

namespace tessera {
namespace {

template <typename Code>
class MomentCodes : public ::testing::Test {};
using AllCodes = ::testing::Types<FirstMomentFp8, SecondMomentFp8, FirstMomentF16, SecondMomentF16>;
TYPED_TEST_SUITE(MomentCodes, AllCodes);

/// By the definition of such numbers: E8M0 times the element.
template <typename Code>
double value_of(uint32_t code, int scale) {
  const uint32_t magnitude = code & Code::kMagnitudes;
  const auto exponent = static_cast<int>(magnitude >> Code::kMantissa);
  const double mantissa = std::ldexp(magnitude & ((1U << Code::kMantissa) - 1), -Code::kMantissa);
  const double value = exponent == 0 ? std::ldexp(mantissa, 1 - Code::kBias)
                                     : std::ldexp(1 + mantissa, exponent - Code::kBias);
  const double sign = Code::kSigned && code > Code::kMagnitudes ? -1 : 1;
  return sign * std::ldexp(value, scale - 127);
}

TYPED_TEST(MomentCodes, AreTheNumbersOfTheirFormat) {
  using Code = TypeParam;
  for (const int scale : {static_cast<int>(Code::kMinScale), 100, 127, 200}) {
    const uint32_t base = Code::base_of(static_cast<uint8_t>(scale));
    for (uint32_t code = 0; code <= Code::kLargest; ++code) {
      ASSERT_EQ(Code::decode(code, base), value_of<Code>(code, scale)) << code;
      if (Code::kSigned) {
        const uint32_t negative = code | (Code::kMagnitudes + 1);
        ASSERT_EQ(Code::decode(negative, base), value_of<Code>(negative, scale)) << code;
      }
    }
    EXPECT_TRUE(std::isnan(Code::decode(Code::kMagnitudes, base)));
  }
}

TYPED_TEST(MomentCodes, OfWhatTheyTellAreThemselves) {
  using Code = TypeParam;
  const uint32_t base = Code::base_of(130);
  for (uint32_t code = 0; code <= Code::kLargest; ++code) {
    const float value = Code::decode(code, base);
    for (const uint32_t random : {0U, 1U, 0x8000U, 0xffffU})
      ASSERT_EQ(Code::encode_stochastically(value, base, random), code);
    ASSERT_EQ(Code::encode_nearest(value, base), code);
  }
}

/// Values that a block's largest, of any mantissa, scales. The random bits of a rounding are
/// all 16.
TYPED_TEST(MomentCodes, RoundToTheNeighboursByDistance) {
  using Code = TypeParam;
  constexpr bool kSquares =
      std::is_same_v<Code, SecondMomentFp8> || std::is_same_v<Code, SecondMomentF16>;
  Random random(3, Code::kMantissa);
  for (int i = 0; i < 200; ++i) {
    const auto largest = static_cast<float>(std::exp(4 * random.next_normal()));
    const auto scale = Code::scale_of(word_of_float(largest));
    const uint32_t base = Code::base_of(scale);
    const float share =
        i % 5 == 0 ? 1.0F : static_cast<float>(std::exp(-random.next_uniform() * 15));
    const float value = largest * share;
    const uint32_t below = Code::encode(value, base, 0);
    ASSERT_LE(below, Code::kLargest);
    const double down = Code::decode(below, base);
    double mean = 0;
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      const uint32_t code = Code::encode_stochastically(value, base, bits);
      ASSERT_TRUE(code == below || code == below + 1) << value << " in a block of " << largest;
      ASSERT_LE(code, Code::kLargest);
      mean += Code::decode(code, base) / 65536.0;
    }
    const double unit = Code::decode(below + 1, base) - down;
    if (kSquares && value < down) continue;  // the smallest square
    ASSERT_GE(value, down);
    // The bits of a rounding are 16, and a sum of small numbers is rounded before.
    EXPECT_NEAR(mean, value, unit * 2e-5) << largest;
    const double nearest = Code::decode(Code::encode_nearest(value, base), base);
    EXPECT_LE(std::abs(nearest - value), unit * 0.5001);
  }
}

TYPED_TEST(MomentCodes, KeepZeroAndWhatIsNotFinite) {
  using Code = TypeParam;
  const float infinity = std::numeric_limits<float>::infinity();
  const uint32_t base = Code::base_of(Code::scale_of(word_of_float(infinity)));
  EXPECT_EQ(Code::decode(Code::encode_stochastically(infinity, base, 0xffff), base), infinity);
  for (const float nan : {std::nanf(""), -std::nanf(""), float_of_word(0x7f800001U)})
    EXPECT_TRUE(std::isnan(Code::decode(Code::encode_stochastically(nan, base, 0xffff), base)));
  EXPECT_EQ(Code::encode_stochastically(0.0F, base, 0xffff), 0U);
  // What a fresh state is: zeros.
  EXPECT_EQ(Code::decode(0, Code::base_of(0)), 0.0F);
  const float largest = std::numeric_limits<float>::max();
  const uint32_t most = Code::base_of(Code::scale_of(word_of_float(largest)));
  EXPECT_GE(Code::decode(Code::encode_stochastically(largest, most, 0), most), largest * 0.9F);
  // Denormal numbers.
  const uint32_t least = Code::base_of(Code::scale_of(1));
  EXPECT_LE(Code::decode(Code::encode_stochastically(float_of_word(1), least, 0), least), 1e-37F);
}

/// Updates are divided by its root.
TEST(SecondMomentCodes, KeepASquareThatIsNotZero) {
  const auto check = [&]<typename Code>() {
    const uint32_t base = Code::base_of(Code::scale_of(word_of_float(1.0F)));
    for (const float square : {1e-15F, 1e-20F, 1e-38F, float_of_word(1)}) {
      const float kept = Code::decode(Code::encode_stochastically(square, base, 0), base);
      EXPECT_GT(kept, 0.0F);
      EXPECT_LT(kept, 1e-9F);
    }
  };
  check.operator()<SecondMomentFp8>();
  check.operator()<SecondMomentF16>();
}

OwnedTensor random_moments(Random& random, const Shape& shape, Moment moment) {
  OwnedTensor tensor(DType::kF32, shape);
  for (float& x : tensor.get().span<float>()) {
    const double value = random.next_normal() * std::exp(2 * random.next_normal());
    x = static_cast<float>(moment == Moment::kSecond ? 1e-8 * value * value : value);
  }
  return tensor;
}

struct Coded {
  Coded(Moment moment, MomentKind kind, const Shape& shape)
      : codes(moment_dtype(kind), shape),
        scales(DType::kU8, shape_of_scales(shape)),
        coded{moment, kind, codes, scales, 0} {}
  OwnedTensor codes;
  OwnedTensor scales;
  CodedMoments coded;
};

/// Each is off by half a step at most: of its own size, or of the smallest that its block has.
TEST(MomentBlocks, ComeBackWithinTheirErrors) {
  Random random(8, 8);
  for (const Shape& shape : {Shape{0, 5}, Shape{3, 0}, Shape{1, 1}, Shape{7, 127}, Shape{4, 128},
                             Shape{5, 129}, Shape{2, 1000}}) {
    for (const Moment moment : {Moment::kFirst, Moment::kSecond}) {
      for (const MomentKind kind : {MomentKind::kF16, MomentKind::kFp8}) {
        const OwnedTensor values = random_moments(random, shape, moment);
        const Coded kept(moment, kind, shape);
        encode_moments(values, kept.coded);
        const OwnedTensor back(DType::kF32, shape);
        decode_moments(kept.coded, back);
        const double step = kind == MomentKind::kF16 ? 1.0 / 2048 : 1.0 / 16;
        const double smallest = moment == Moment::kSecond || kind == MomentKind::kF16 ? 1e-8 : 1e-5;
        for (int64_t row = 0; row < shape[0]; ++row) {
          for (int64_t c = 0; c < shape[1]; ++c) {
            const float* const block =
                values.get().as<float>() + row * shape[1] + c / kMomentBlock * kMomentBlock;
            double largest = 0;
            const int64_t end = std::min(kMomentBlock, shape[1] - c / kMomentBlock * kMomentBlock);
            for (int64_t k = 0; k < end; ++k)
              largest = std::max<double>(largest, std::abs(block[k]));
            const double value = values.get().as<float>()[row * shape[1] + c];
            ASSERT_NEAR(back.get().as<float>()[row * shape[1] + c], value,
                        step * std::abs(value) + smallest * largest);
          }
        }
        // What they tell is kept without any error.
        const Coded again(moment, kind, shape);
        encode_moments(back, again.coded);
        const OwnedTensor twice(DType::kF32, shape);
        decode_moments(again.coded, twice);
        EXPECT_TRUE(std::ranges::equal(twice.get().span<float>(), back.get().span<float>()));
      }
    }
  }
}

/// As a rank reads them that holds any columns.
TEST(MomentBlocks, DecodeFromAnyColumnOn) {
  Random random(9, 8);
  const Shape shape = {3, 700};
  const OwnedTensor values = random_moments(random, shape, Moment::kFirst);
  const Coded kept(Moment::kFirst, MomentKind::kFp8, shape);
  encode_moments(values, kept.coded);
  const OwnedTensor all(DType::kF32, shape);
  decode_moments(kept.coded, all);
  for (int i = 0; i < 50; ++i) {
    const auto begin = static_cast<int64_t>(random.next_below(700));
    const auto count = static_cast<int64_t>(random.next_below(701 - begin));
    const Slice slice = Slice::of_columns(shape, {begin, count});
    const Slice scale_slice = slice_of_scales(slice);
    const OwnedTensor codes(DType::kU8, slice.shape());
    const OwnedTensor scales(DType::kU8, scale_slice.shape());
    copy_slice_from(slice, kept.codes, codes);
    copy_slice_from(scale_slice, kept.scales, scales);
    const OwnedTensor part(DType::kF32, slice.shape());
    decode_moments({Moment::kFirst, MomentKind::kFp8, codes, scales, begin}, part);
    const OwnedTensor expected(DType::kF32, slice.shape());
    copy_slice_from(slice, all, expected);
    EXPECT_TRUE(std::ranges::equal(part.get().span<float>(), expected.get().span<float>()))
        << begin << ", " << count;
  }
}

TEST(MomentBlocks, WholeBlocksAreTold) {
  const Shape shape = {4, 300};
  const auto whole = [&](int64_t begin, int64_t count) {
    return has_whole_blocks(Slice::of_columns(shape, {begin, count}));
  };
  EXPECT_TRUE(whole(0, 300));
  EXPECT_TRUE(whole(128, 172));
  EXPECT_TRUE(whole(128, 128));
  EXPECT_FALSE(whole(0, 150));
  EXPECT_FALSE(whole(150, 150));
}

}  // namespace
}  // namespace tessera
