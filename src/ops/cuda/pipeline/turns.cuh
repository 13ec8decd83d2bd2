#pragma once

#include "ops/cuda/pipeline/warp_roles.cuh"

namespace tessera::cuda {

/// Two warpgroups multiply in turns, so that one adds up while the other multiplies; left to
/// themselves both wait for the tensor cores and then both leave them idle. A warpgroup's turn
/// begins while the last of the other's products are under way. Takes two named barriers.
template <int kFirstBarrier>
struct Turns {
  /// By each warpgroup, before its first turn.
  static __device__ __forceinline__ void begin(int group) {
    if (group == 1) give(0);
  }
  static __device__ __forceinline__ void wait(int group) {
    sync_threads(kFirstBarrier + group, 2 * kWarpgroup);
  }
  static __device__ __forceinline__ void give(int group) {
    arrive_threads(kFirstBarrier + group, 2 * kWarpgroup);
  }
};

}  // namespace tessera::cuda
