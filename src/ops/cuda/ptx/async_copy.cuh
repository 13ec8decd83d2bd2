#pragma once

#include "ops/cuda/ptx/barrier.cuh"

/// Copies from global to shared memory that a thread starts and waits for by itself (cp.async), so
/// that bytes are under way without registers. What a thread has copied, it may read after the
/// wait; others need a barrier.
namespace tessera::cuda {

/// One value of 2, 4, 8 or 16 bytes; those of 2 are copied at once, since nothing moves them alone.
template <typename T>
__device__ __forceinline__ void copy_async(T* to, const T* from) {
  if constexpr (sizeof(T) == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
                 : "memory");
  } else if constexpr (sizeof(T) >= 4) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from),
                 "n"(sizeof(T))
                 : "memory");
  } else {
    *to = *from;
  }
}

/// 16 bytes, or zeros, for which `from` is not read but must be an address of the GPU's memory.
template <typename T>
__device__ __forceinline__ void copy_async_or_zero(T* to, const T* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
}

/// Ends a group of the thread's copies; it may be empty.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Until all of the thread's groups but the last kPending have arrived.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace tessera::cuda
