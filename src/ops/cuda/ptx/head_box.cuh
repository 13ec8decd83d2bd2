#pragma once

#include <cuda.h>

#include "ops/cuda/ptx/barrier.cuh"

namespace tessera::cuda {

/// Where a box of one head begins; see make_heads_map.
struct HeadBox {
  int column;
  int head;
  int row;
};

/// Global to shared memory of this block; completes on `full`.
__device__ __forceinline__ void load_head_box(void* to, const CUtensorMap* map, HeadBox box,
                                              Barrier* full) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(full)), "r"(box.column), "r"(box.head), "r"(box.row)
      : "memory");
}

}  // namespace tessera::cuda
