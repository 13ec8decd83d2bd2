#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace tessera {

struct PhiloxWords {
  uint32_t of[4];
};

/// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): 128 random
/// bits as a pure function of a 128-bit counter and a 64-bit key, the lowest words first.
TESSERA_HOST_DEVICE_INLINE PhiloxWords philox_words(PhiloxWords counter, uint32_t key_low,
                                                    uint32_t key_high) {
  constexpr uint64_t kMultiplier0 = 0xD2511F53;
  constexpr uint64_t kMultiplier1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9;
  constexpr uint32_t kWeyl1 = 0xBB67AE85;
  constexpr int kRounds = 10;
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t product0 = kMultiplier0 * counter.of[0];
    const uint64_t product1 = kMultiplier1 * counter.of[2];
    counter = {{static_cast<uint32_t>(product1 >> 32U) ^ counter.of[1] ^ key_low,
                static_cast<uint32_t>(product1),
                static_cast<uint32_t>(product0 >> 32U) ^ counter.of[3] ^ key_high,
                static_cast<uint32_t>(product0)}};
    key_low += kWeyl0;
    key_high += kWeyl1;
  }
  return counter;
}

}  // namespace tessera
