#pragma once

#include <cuda.h>

#include "ops/cuda/ptx/barrier.cuh"
#include "ops/cuda/tensor_map.h"

namespace tessera::cuda {

/// Where a box begins: kBlocksMapRows - row rows before the values' place `end`, which counts 64s.
/// What it covers from that place on reads as zero and is not written. See make_blocks_map.
struct BlockBox {
  int end;
  int row;
};

/// The box from row `first` of num_rows rows on, which end at `end`.
__device__ __forceinline__ BlockBox block_box(int end, int num_rows, int first) {
  return {end, kBlocksMapRows - num_rows + first};
}

/// Global to shared memory of this block by TMA; completes on `full`.
__device__ __forceinline__ void load_block_box(void* to, const CUtensorMap* map, BlockBox box,
                                               Barrier* full) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {0, %3, %4}], [%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(full)), "r"(box.end), "r"(box.row)
      : "memory");
}

/// Global to the same place in shared memory of every block of the cluster in `mask`; completes on
/// each one's barrier.
__device__ __forceinline__ void load_block_box_to_all(void* to, const CUtensorMap* map,
                                                      BlockBox box, Barrier* full, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {0, %3, %4}], [%2], %5;" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(full)), "r"(box.end), "r"(box.row), "h"(mask)
      : "memory");
}

/// Shared to global memory by TMA.
__device__ __forceinline__ void store_block_box(const CUtensorMap* map, const void* from,
                                                BlockBox box) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {0, %2, %3}], [%1];" ::"l"(
          map),
      "r"(shared_address(from)), "r"(box.end), "r"(box.row)
      : "memory");
}

}  // namespace tessera::cuda
