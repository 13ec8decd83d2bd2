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

}  // namespace tessera
