#pragma once

#include <bit>
#include <cstdint>

#include "core/dtype.h"
#include "core/host_device.h"

namespace tessera {

/// IEEE half precision (binary16), all of whose values are F32 values. Rounds to nearest even; what
/// is 65520 and beyond becomes infinite, and NaN keeps its sign and the top of its payload, as the
/// processors' conversions have it. Source: IEEE 754-2008, section 3.6.
struct Half {
  uint16_t bits = 0;

  Half() = default;
  TESSERA_HOST_DEVICE_INLINE explicit Half(float value) : bits(round(value)) {}
  TESSERA_HOST_DEVICE_INLINE operator float() const {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000U) << 16;
    const uint32_t magnitude = bits & 0x7fffU;
    const uint32_t shifted = (magnitude << kShift) + kRebias;
    // Infinity and NaN have the largest exponent of either type.
    const uint32_t normal = magnitude >= kInfinity ? shifted + kRebias : shifted;
    const float small = std::bit_cast<float>(kSmallestNormal + (magnitude << kShift)) -
                        std::bit_cast<float>(kSmallestNormal);
    const uint32_t word = magnitude < kNormalCode ? std::bit_cast<uint32_t>(small) : normal;
    return std::bit_cast<float>(sign | word);
  }

 private:
  static constexpr int kShift = 23 - 10;
  static constexpr uint32_t kRebias = (127U - 15U) << 23;
  static constexpr uint32_t kInfinity = 0x7c00;
  static constexpr uint32_t kNormalCode = 0x400;
  static constexpr uint32_t kSmallestNormal = 0x38800000;  // 2^-14
  /// A number whose last digit is worth the smallest subnormal: adding it rounds to that.
  static constexpr uint32_t kSubnormalUnit = 0x3f000000;  // 0.5

  TESSERA_HOST_DEVICE_INLINE static uint16_t round(float value) {
    const uint32_t word = std::bit_cast<uint32_t>(value);
    const auto sign = static_cast<uint16_t>(word >> 16 & 0x8000U);
    const uint32_t magnitude = word & 0x7fffffffU;
    const float shifted = std::bit_cast<float>(magnitude) + std::bit_cast<float>(kSubnormalUnit);
    const uint32_t small = std::bit_cast<uint32_t>(shifted) - kSubnormalUnit;
    const uint32_t rounded = magnitude + 0xfffU + (magnitude >> kShift & 1U);
    const uint32_t normal = (rounded - kRebias) >> kShift;
    const uint32_t finite = magnitude < kSmallestNormal ? small : normal;
    const uint32_t number = finite < kInfinity ? finite : kInfinity;
    const uint32_t nan = 0x7e00U | (magnitude >> kShift & 0x3ffU);
    return static_cast<uint16_t>(sign | (magnitude > 0x7f800000U ? nan : number));
  }
};
static_assert(sizeof(Half) == 2);

template <>
struct DTypeOf<Half> {
  static constexpr DType value = DType::kF16;
};

}  // namespace tessera
