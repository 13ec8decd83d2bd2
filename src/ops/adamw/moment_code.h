#pragma once

#include <cstdint>

#include "ops/adamw/state_formats.h"
#include "ops/adamw/state_rounding.h"
#include "ops/float_word.h"

/// Moments in blocks: floating-point numbers of few bits, which a power of two that a block shares
/// scales, so that its largest has the highest exponents. The scale is kept as E8M0, a byte s for
/// 2^(s - 127) (OCP Microscaling Formats, 1.0). A power of two costs no digits, and what is kept
/// in a format and in F32 by turns stays the same. All of it works on the words of floats, or by
/// single exact sums, so that CPUs and GPUs do the same.
///
/// Averages of gradients are E4M3 (as in FP8-LM, Peng and others, 2023, and COAT, Xi and others,
/// 2024) or IEEE's F16. Averages of squares have no sign, whose bit is a further one of the
/// exponent in E5M3: it reaches as far as the root of them in E4M3, with half its error, and
/// rounded stochastically it is right on average, which the square of a rounded root is not.
namespace tessera {

/// Numbers (1 + mantissa / 2^kMantissa) · 2^(exponent - kBias), those of exponent 0 without the 1
/// and with exponent 1. kLargest is the magnitude of the largest, all ones that of NaN.
template <typename CodeType, int kExponentBits, int kMantissaBits, uint32_t kLargestCode,
          bool kSquares>
struct MomentCode {
  using Code = CodeType;
  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  static constexpr int kMantissa = kMantissaBits;
  static constexpr uint32_t kLargest = kLargestCode;
  static constexpr bool kSigned = 1 + kExponentBits + kMantissaBits == 8 * sizeof(Code);
  static constexpr uint32_t kMagnitudes = (1U << (kExponentBits + kMantissaBits)) - 1;
  static constexpr int kShift = 23 - kMantissaBits;  ///< of F32's mantissa to the code's
  /// The scale below which the smallest numbers would have no place in F32; smaller blocks take it.
  static constexpr uint32_t kMinScale = kBias + kMantissaBits;

  /// The scale of a block from the words of its largest magnitude: the smallest with which nothing
  /// rounds to more than kLargest.
  TESSERA_HOST_DEVICE_INLINE static constexpr uint8_t scale_of(uint32_t largest) {
    constexpr uint32_t kMantissaOfLargest = kLargest & ((1U << kMantissaBits) - 1);
    constexpr uint32_t kMargin = 0x7fffffU - (kMantissaOfLargest << kShift);
    constexpr uint32_t kTop = (kLargest >> kMantissaBits) - kBias;
    const uint32_t finite = largest < 0x7f800000U ? largest : 0x7f800000U;
    const uint32_t exponent = (finite + kMargin) >> 23U;
    return static_cast<uint8_t>(exponent < kTop + kMinScale ? kMinScale : exponent - kTop);
  }

  /// The word of the smallest number of exponent 1 of a block.
  TESSERA_HOST_DEVICE_INLINE static constexpr uint32_t base_of(uint8_t scale) {
    const uint32_t s = scale < kMinScale ? kMinScale : scale;
    return (s + 1 - kBias) << 23U;
  }

  TESSERA_HOST_DEVICE_INLINE static constexpr float decode(uint32_t code, uint32_t base) {
    const uint32_t magnitude = code & kMagnitudes;
    const uint32_t shifted = base + (magnitude << kShift);
    const float small = float_of_word(shifted) - float_of_word(base);
    uint32_t word = choose(is_below(magnitude, 1U << kMantissaBits), word_of_float(small),
                           shifted - (1U << 23U));
    word = choose(magnitude == kMagnitudes, 0x7fc00000U, word);
    if constexpr (kSigned) word |= (code >> (8 * sizeof(Code) - 1)) << 31U;
    return float_of_word(word);
  }

  /// `below` is added to what is cut off, of kShift bits. A square that is not 0 stays so, since
  /// updates are divided by its root.
  TESSERA_HOST_DEVICE_INLINE static constexpr Code encode(float value, uint32_t base,
                                                          uint32_t below) {
    const uint32_t word = word_of_float(value);
    const uint32_t magnitude = word & 0x7fffffffU;
    const bool small = is_below(magnitude, base);
    const float sum = float_of_word(magnitude) + float_of_word(base);
    const uint32_t shifted = choose(small, word_of_float(sum), magnitude);
    uint32_t code = ((shifted + below) >> kShift) - (base >> kShift);
    code += choose(small, 0U, 1U << kMantissaBits);
    if constexpr (kSquares) code += magnitude != 0 && code == 0 ? 1U : 0U;
    code = choose(is_below(0x7f800000U, magnitude), kMagnitudes, code);
    if constexpr (kSigned) code |= (word >> 31U) << (8 * sizeof(Code) - 1);
    return static_cast<Code>(code);
  }

  /// Rounds to the number below or above, the latter with the probability of its distance: of 16
  /// random bits.
  TESSERA_HOST_DEVICE_INLINE static constexpr Code encode_stochastically(float value, uint32_t base,
                                                                         uint32_t random) {
    return encode(value, base, spread(random));
  }

  /// Rounds to nearest, and upwards halfway.
  TESSERA_HOST_DEVICE_INLINE static constexpr Code encode_nearest(float value, uint32_t base) {
    return encode(value, base, 1U << (kShift - 1));
  }

 private:
  /// Of words below 2^31, whose comparison as signed ones AVX2 has.
  TESSERA_HOST_DEVICE_INLINE static constexpr bool is_below(uint32_t a, uint32_t b) {
    return static_cast<int32_t>(a) < static_cast<int32_t>(b);
  }
  /// Without a branch, in which compilers would leave a sum that only one side needs, and vectorize
  /// neither.
  TESSERA_HOST_DEVICE_INLINE static constexpr uint32_t choose(bool first, uint32_t a, uint32_t b) {
    const uint32_t mask = 0U - static_cast<uint32_t>(first);
    return (a & mask) | (b & ~mask);
  }
  /// 16 random bits as kShift of them; where these are more, in the middle of what they stand for.
  TESSERA_HOST_DEVICE_INLINE static constexpr uint32_t spread(uint32_t random) {
    if constexpr (kShift <= 16) {
      return random >> (16 - kShift);
    } else {
      return random << (kShift - 16) | 1U << (kShift - 17);
    }
  }
};

using FirstMomentFp8 = MomentCode<uint8_t, 4, 3, 0x7eU, false>;
using SecondMomentFp8 = MomentCode<uint8_t, 5, 3, 0xfeU, true>;
using FirstMomentF16 = MomentCode<uint16_t, 5, 10, 0x7bffU, false>;
using SecondMomentF16 = MomentCode<uint16_t, 5, 10, 0x7bffU, true>;

/// Calls run.operator()<Code>() for a kind with scales.
template <typename Run>
void with_first_moment_code(MomentKind kind, const Run& run) {
  kind == MomentKind::kFp8 ? run.template operator()<FirstMomentFp8>()
                           : run.template operator()<FirstMomentF16>();
}
template <typename Run>
void with_second_moment_code(MomentKind kind, const Run& run) {
  kind == MomentKind::kFp8 ? run.template operator()<SecondMomentFp8>()
                           : run.template operator()<SecondMomentF16>();
}

}  // namespace tessera
