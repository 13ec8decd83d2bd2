#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/philox.h"

/// The factors of Jitter, of which CPUs and GPUs make the same bits.
namespace tessera {

/// The factors of this many neighbouring columns come of one counter.
constexpr int kJitterColumns = 4;

/// The random words of so many columns of a token.
TESSERA_HOST_DEVICE_INLINE PhiloxWords jitter_words(uint32_t key_low, uint32_t key_high,
                                                    int64_t token, uint32_t column_group) {
  const auto number = static_cast<uint64_t>(token);
  return philox_words(
      {{column_group, static_cast<uint32_t>(number), static_cast<uint32_t>(number >> 32U), 0}},
      key_low, key_high);
}

/// Of a word, uniform in [1 - eps, 1 + eps). The product is exact in F64, so that it does not
/// matter whether sum and product are made in one.
TESSERA_HOST_DEVICE_INLINE float jitter_factor(uint32_t word, float eps) {
  const int32_t part = static_cast<int32_t>(word >> 8U) - (1 << 23);
  return static_cast<float>(1.0 + static_cast<double>(eps) * (static_cast<double>(part) * 0x1p-23));
}

}  // namespace tessera
