#pragma once

#include <cuda.h>

#include "ops/cuda/ptx/barrier.cuh"

namespace tessera::cuda {

/// TMA, which copies boxes of tensors. Coordinates count elements, the contiguous dim first.
struct Box {
  int column;
  int row;
};

__device__ __forceinline__ void prefetch(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// Global to shared memory of this block; completes on `full`.
__device__ __forceinline__ void load_box(void* to, const CUtensorMap* map, Box box, Barrier* full) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(full)), "r"(box.column), "r"(box.row)
      : "memory");
}

/// Global to the same place in shared memory of every block of the cluster in `mask`; completes on
/// each one's barrier.
__device__ __forceinline__ void load_box_to_all(void* to, const CUtensorMap* map, Box box,
                                                Barrier* full, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(full)), "r"(box.column), "r"(box.row), "h"(mask)
      : "memory");
}

/// Shared to global; what lies outside the tensor is left out.
__device__ __forceinline__ void store_box(const CUtensorMap* map, const void* from, Box box) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
      "r"(shared_address(from)), "r"(box.column), "r"(box.row)
      : "memory");
}

/// Bytes as they lie, aligned to 16 and a multiple of it; completes on `full`.
__device__ __forceinline__ void load_bytes(void* to, const void* from, uint32_t num_bytes,
                                           Barrier* full) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(num_bytes), "r"(shared_address(full))
      : "memory");
}
__device__ __forceinline__ void store_bytes(void* to, const void* from, uint32_t num_bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(num_bytes)
               : "memory");
}

__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/// Until all but the last kPending groups of stores have read their shared memory.
template <int kPending>
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

/// A thread's own copy of 16 aligned bytes, global to shared memory, or of 16 zeros.
__device__ __forceinline__ void copy_16_bytes(uint32_t to, const void* from, bool is_there) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(is_there ? 16 : 0)
               : "memory");
}
/// Arrives at `landed` when this thread's copies until now are there.
__device__ __forceinline__ void arrive_when_copied(Barrier* landed) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(landed))
               : "memory");
}

/// Orders ordinary writes of shared memory before TMA's and the tensor cores' reads.
__device__ __forceinline__ void fence_shared_for_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace tessera::cuda
