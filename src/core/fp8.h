#pragma once

#include <bit>
#include <cstdint>

#include "core/dtype.h"

namespace tessera {

/// Eight bits of a sign, kExponentBits and kMantissaBits. Rounds to nearest even; what is beyond
/// the largest number, infinity too, becomes that number with its sign, and NaN becomes one without
/// a sign, as CUDA's casts that saturate have it. Source: OCP 8-bit Floating Point
/// Specification, 1.0.
template <int kExponentBits, int kMantissaBits, uint8_t kLargestCode>
struct Fp8 {
  /// Digits behind the first; the smallest number above zero, and the largest.
  static constexpr int kDigits = kMantissaBits;
  static constexpr float kSmallest =
      std::bit_cast<float>((127U + 2 - (1U << (kExponentBits - 1)) - kMantissaBits) << 23);
  static constexpr float kLargest =
      std::bit_cast<float>((static_cast<uint32_t>(kLargestCode) << (23 - kMantissaBits)) +
                           ((127U - ((1U << (kExponentBits - 1)) - 1)) << 23));

  uint8_t bits = 0;

  Fp8() = default;
  explicit Fp8(float value) : bits(encode(value)) {}
  operator float() const { return decode(bits); }

 private:
  static constexpr int kShift = 23 - kMantissaBits;
  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  static constexpr uint32_t kSmallestNormal = (127 + 1 - kBias) << 23;
  /// A number whose last digit is worth the smallest subnormal: adding it rounds to that.
  static constexpr uint32_t kSubnormalUnit = (127 + 1 - kBias + kShift) << 23;
  static constexpr uint8_t kNan = 0x7f;

  static uint8_t encode(float value) {
    const uint32_t word = std::bit_cast<uint32_t>(value);
    const uint32_t magnitude = word & 0x7fffffffU;
    const auto sign = static_cast<uint8_t>(word >> 31 << 7);
    if (magnitude > 0x7f800000U) return kNan;
    uint32_t code = 0;
    if (magnitude < kSmallestNormal) {
      const float unit = std::bit_cast<float>(kSubnormalUnit);
      code = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + unit) - kSubnormalUnit;
    } else {
      const uint32_t rounded = magnitude + ((1U << (kShift - 1)) - 1) + (magnitude >> kShift & 1U);
      code = (rounded >> kShift) - ((127U - kBias) << kMantissaBits);
    }
    return sign | static_cast<uint8_t>(code < kLargestCode ? code : kLargestCode);
  }

  static float decode(uint8_t code) {
    const uint32_t sign = static_cast<uint32_t>(code >> 7) << 31;
    const uint32_t magnitude = code & 0x7fU;
    if (magnitude > kLargestCode) return std::bit_cast<float>(sign | special(magnitude));
    const uint32_t shifted = (magnitude << kShift) + ((127U - kBias) << 23);
    if (magnitude >> kMantissaBits != 0) return std::bit_cast<float>(sign | shifted);
    const float small = std::bit_cast<float>(kSmallestNormal + (magnitude << kShift)) -
                        std::bit_cast<float>(kSmallestNormal);
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(small));
  }

  /// E5M2 has infinity behind its largest number, E4M3 NaN alone.
  static uint32_t special(uint32_t magnitude) {
    const bool infinite = kMantissaBits == 2 && magnitude == kLargestCode + 1U;
    return infinite ? 0x7f800000U : 0x7fc00000U;
  }
};

using E4m3 = Fp8<4, 3, 0x7e>;
using E5m2 = Fp8<5, 2, 0x7b>;
/// A number of four bits in a byte, whose sign is the first bit. Unlike those that tensor cores
/// read, it has a NaN.
using E2m1 = Fp8<2, 1, 0x07>;
static_assert(sizeof(E4m3) == 1);

constexpr float kLargestE4m3 = E4m3::kLargest;
constexpr float kLargestE5m2 = E5m2::kLargest;
constexpr float kLargestE2m1 = E2m1::kLargest;
static_assert(kLargestE4m3 == 448 && kLargestE5m2 == 57344 && kLargestE2m1 == 6);

template <>
struct DTypeOf<E4m3> {
  static constexpr DType value = DType::kE4M3;
};
template <>
struct DTypeOf<E5m2> {
  static constexpr DType value = DType::kE5M2;
};

}  // namespace tessera
