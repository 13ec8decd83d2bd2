#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace tessera {

// The compiler's own form of std::bit_cast, which GPUs have as well.
TESSERA_HOST_DEVICE_INLINE constexpr uint32_t word_of_float(float value) {
  return __builtin_bit_cast(uint32_t, value);
}
TESSERA_HOST_DEVICE_INLINE constexpr float float_of_word(uint32_t word) {
  return __builtin_bit_cast(float, word);
}

/// In the order of the values; -0 is 0, and NaN comes above or below all others, by its sign.
TESSERA_HOST_DEVICE_INLINE constexpr uint32_t ordered_word(float value) {
  const uint32_t bits = word_of_float(value + 0.0F);
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}

}  // namespace tessera
