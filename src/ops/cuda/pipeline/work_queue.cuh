#pragma once

#include <cstdint>
#include <cstring>

#include "ops/cuda/ptx/barrier.cuh"

namespace tessera::cuda {

/// What a cluster of two blocks multiplies next, in the shared memory of both, up to kDepth tiles
/// of it: one thread of the first block hands it out, and all who work by it take it. Work is 32
/// bytes with a member `expert`, which is negative when there is no more. A turn counts what its
/// thread has handed out or taken.
template <typename Work, int kDepth>
struct WorkQueue {
  static constexpr int kWarpsThatMultiply = 8;  // of a block

  int4 work[kDepth][2];
  Barrier full[kDepth];
  Barrier empty[kDepth];  // those of the first block count

  /// `num_others` take it besides those that multiply, in each block.
  __device__ void init(int num_others) {
    for (int i = 0; i < kDepth; ++i) {
      full[i].init(1);
      empty[i].init(2 * (num_others + kWarpsThatMultiply));
    }
  }

  __device__ void hand_out(const Work& next, uint32_t& turn) {
    static_assert(sizeof(Work) == sizeof(work[0]));
    int4 parts[2];
    memcpy(parts, &next, sizeof(Work));
    const uint32_t at = turn % kDepth;
    empty[at].wait(parity(turn) ^ 1);
    ++turn;
    for (int rank = 0; rank < 2; ++rank) {
      full[at].arrive_and_expect_at(rank, sizeof(Work));
      for (int i = 0; i < 2; ++i) send(&work[at][i], parts[i], &full[at], rank);
    }
  }
  /// Until all have taken what was handed out last.
  __device__ void wait_taken(uint32_t turn) { empty[(turn - 1) % kDepth].wait(parity(turn - 1)); }

  /// For a thread alone.
  __device__ Work take(uint32_t& turn) {
    const Work next = read(turn);
    empty[turn++ % kDepth].arrive_at(0);
    return next;
  }

  /// For all threads of a warp.
  __device__ Work take_in_warp(uint32_t& turn) {
    const Work next = read(turn);
    __syncwarp();
    if (threadIdx.x % 32 == 0) empty[turn % kDepth].arrive_at(0);
    ++turn;
    return next;
  }

 private:
  static __device__ uint32_t parity(uint32_t turn) { return turn / kDepth % 2; }

  __device__ Work read(uint32_t turn) {
    const uint32_t at = turn % kDepth;
    full[at].wait(parity(turn));
    const int4 parts[2] = {work[at][0], work[at][1]};
    Work next;
    memcpy(&next, parts, sizeof(Work));
    return next;
  }
};

/// Raises a counter that wraps to zero at `end`; its value before.
__device__ inline int take_next(int* counter, int end) {
  return static_cast<int>(
      atomicInc(reinterpret_cast<unsigned*>(counter), static_cast<unsigned>(end - 1)));
}

/// Hands out all of the cluster's work, then the sign that there is no more. Clusters take tiles
/// from a counter, so that one with small tiles takes more of them; without a counter, in turns.
/// The counter begins at zero: it is raised once for each tile, and the last time wraps it to zero.
/// No tile is taken before its time: wait(work, turn) waits for the one that was handed out last.
template <typename Work, int kDepth, typename FindWork, typename Wait>
__device__ void hand_out_all(WorkQueue<Work, kDepth>& queue, int num_tiles, int* counter,
                             const FindWork& find_work, const Wait& wait) {
  const int num_clusters = gridDim.x / 2;
  uint32_t turn = 0;
  int tile = blockIdx.x / 2;
  while (tile < num_tiles) {
    const Work work = find_work(tile);
    queue.hand_out(work, turn);
    wait(work, turn);
    tile = num_clusters + (counter == nullptr ? tile : take_next(counter, num_tiles));
  }
  Work last{};
  last.expert = -1;
  queue.hand_out(last, turn);
}

}  // namespace tessera::cuda
