#pragma once

#include <cstdint>

#include "ops/host_device.h"

/// The factors of Jitter, of which CPUs and GPUs make the same bits.
namespace tessera {

/// The factors of this many neighbouring columns come of one counter.
constexpr int kJitterColumns = 4;

/// The words of Philox4x32-10 (core/random.h) at this counter.
struct JitterWords {
  uint32_t of[kJitterColumns];
};
TESSERA_HOST_DEVICE_INLINE JitterWords jitter_words(uint32_t key_low, uint32_t key_high,
                                                    int64_t token, uint32_t column_group) {
  const auto number = static_cast<uint64_t>(token);
  uint32_t a = column_group;
  uint32_t b = static_cast<uint32_t>(number);
  uint32_t c = static_cast<uint32_t>(number >> 32U);
  uint32_t d = 0;
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t{0xD2511F53} * a;
    const uint64_t second = uint64_t{0xCD9E8D57} * c;
    a = static_cast<uint32_t>(second >> 32U) ^ b ^ key_low;
    b = static_cast<uint32_t>(second);
    c = static_cast<uint32_t>(first >> 32U) ^ d ^ key_high;
    d = static_cast<uint32_t>(first);
    key_low += 0x9E3779B9U;
    key_high += 0xBB67AE85U;
  }
  return {{a, b, c, d}};
}

/// Of a word, uniform in [1 - eps, 1 + eps). The product is exact in F64, so that it does not
/// matter whether sum and product are made in one.
TESSERA_HOST_DEVICE_INLINE float jitter_factor(uint32_t word, float eps) {
  const int32_t part = static_cast<int32_t>(word >> 8U) - (1 << 23);
  return static_cast<float>(1.0 + static_cast<double>(eps) * (static_cast<double>(part) * 0x1p-23));
}

}  // namespace tessera
