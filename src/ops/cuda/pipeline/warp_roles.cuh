#pragma once

#include "ops/cuda/ptx/barrier.cuh"

namespace tessera::cuda {

constexpr int kWarpgroup = 128;         ///< threads that issue a wgmma together
constexpr int kMaxShared = 227 * 1024;  ///< bytes of shared memory that a block of an SM can have

/// How a block's registers are dealt out by setmaxnreg between one warpgroup that feeds and
/// kMultiplying warpgroups that multiply: of each thread, multiples of 8. They may not be more in
/// all than what the block began with, or the warpgroups that take some wait for ever.
template <int kFeed, int kMultiply, int kMultiplying = 2>
struct WarpRoles {
  static constexpr int kThreads = (1 + kMultiplying) * kWarpgroup;
  static constexpr int kAtStart = 65536 / kThreads / 8 * 8;
  static_assert(kFeed % 8 == 0 && kMultiply % 8 == 0);
  static_assert(kFeed + kMultiplying * kMultiply <= (1 + kMultiplying) * kAtStart);

  /// By all threads of the warpgroup that feeds.
  static __device__ __forceinline__ void begin_feeding() { give_registers_back<kFeed>(); }
  /// By all threads of a warpgroup that multiplies.
  static __device__ __forceinline__ void begin_multiplying() { take_registers<kMultiply>(); }
};

}  // namespace tessera::cuda
