#pragma once

#include <cstdint>

namespace tessera::cuda {

/// A place in a ring of stages, and the parity of its turn.
template <int kStages>
struct RingCursor {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void advance(int count) {
    const int to = stage + count;
    parity ^= to / kStages % 2;
    stage = to % kStages;
  }
};

}  // namespace tessera::cuda
