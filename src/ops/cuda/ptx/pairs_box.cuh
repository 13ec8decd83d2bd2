#pragma once

#include <cuda.h>

#include "ops/cuda/ptx/barrier.cuh"

namespace tessera::cuda {

/// A box of paired rows (make_pairs_map): columns from `column` on, groups of 8 pairs from `group`
/// on.
struct PairsBox {
  int column;
  int group;
  int expert;
};

/// Global to shared memory of this block; completes on `full`.
__device__ __forceinline__ void load_pairs(void* to, const CUtensorMap* map, PairsBox box,
                                           Barrier* full) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, 0, 0, %4, %5}], [%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(full)), "r"(box.column), "r"(box.group), "r"(box.expert)
      : "memory");
}

}  // namespace tessera::cuda
