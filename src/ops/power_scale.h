#pragma once

#include <cmath>
#include <cstdint>

#include "core/host_device.h"
#include "ops/float_word.h"

/// Scales that are powers of two, on CPUs and GPUs. Always inlined, so that sources for several CPU
/// levels share no function.
namespace tessera {

/// Scales of smaller values would not be normal numbers.
constexpr float kSmallestRounded = 0x1p-100F;

/// The least power of two that, times `largest`, is not below `amax`, which is finite.
TESSERA_HOST_DEVICE_INLINE float least_scale(float amax, float largest) {
  constexpr uint32_t kDigits = 0x7fffffU;
  const uint32_t word = word_of_float(amax > kSmallestRounded ? amax : kSmallestRounded);
  const uint32_t of_largest = word_of_float(largest);
  // One power more where the digits are beyond those of `largest`, by a carry.
  const uint32_t power = (word + (kDigits - (of_largest & kDigits))) & ~kDigits;
  return float_of_word(power + word_of_float(1.0F) - (of_largest & ~kDigits));
}

/// The least power of two by which values of up to `amax` are divided so that none is beyond the
/// type's largest number; NaN where one is infinite.
template <typename Number>
TESSERA_HOST_DEVICE_INLINE float power_scale(float amax) {
  return amax < INFINITY ? least_scale(amax, Number::kLargest) : NAN;
}

}  // namespace tessera
