#include <algorithm>

#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/fail.cuh"
#include "ops/expert_clones/expert_clones_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFU;

/// The larger of two has the larger value, of equal values the lower index. 0 stands for none.
__device__ __forceinline__ uint64_t candidate(int64_t value, int idx) {
  return static_cast<uint64_t>(value) << 16U | static_cast<uint64_t>(kCloneMaxIndex - 1 - idx);
}
__device__ __forceinline__ int index_of(uint64_t best) {
  return kCloneMaxIndex - 1 - static_cast<int>(best & (kCloneMaxIndex - 1));
}

__device__ __forceinline__ uint64_t warp_max(uint64_t value) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    const uint64_t other = __shfl_xor_sync(kAllLanes, value, step);
    value = other > value ? other : value;
  }
  return value;
}

__device__ __forceinline__ int64_t warp_sum(int64_t value) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

/// Of all ranks together: tokens of each expert, then of each rank.
__device__ void add_up(const ClonePlanning& p) {
  for (int expert = threadIdx.x; expert < p.num_experts; expert += kThreads) {
    int64_t sum = 0;
    for (int rank = 0; rank < p.num_ranks; ++rank) {
      const int64_t count = p.counts[static_cast<int64_t>(rank) * p.num_experts + expert];
      if (count < 0) fail("clone_plan: a count is negative", count);
      sum += count;
    }
    p.rest[expert] = sum;
  }
  for (int slot = threadIdx.x; slot < p.num_ranks * p.slots_per_rank; slot += kThreads) {
    p.slots[slot] = -1;
    p.quotas[slot] = 0;
  }
  __syncthreads();
  const int num_local = p.num_experts / p.num_ranks;
  for (int rank = threadIdx.x; rank < p.num_ranks; rank += kThreads) {
    int64_t sum = 0;
    for (int e = rank * num_local; e < (rank + 1) * num_local; ++e) sum += p.rest[e];
    p.loads[rank] = sum;
    p.filled[rank] = 0;
  }
  __syncthreads();
}

__device__ int64_t mean_load(const ClonePlanning& p, int lane) {
  int64_t sum = 0;
  for (int rank = lane; rank < p.num_ranks; rank += kLanes) sum += p.loads[rank];
  return (warp_sum(sum) + p.num_ranks - 1) / p.num_ranks;
}

/// The fullest rank, and the emptiest below the mean with a free slot.
__device__ void find_ranks(const ClonePlanning& p, int lane, int64_t mean, uint64_t& giver,
                           uint64_t& taker) {
  giver = taker = 0;
  for (int rank = lane; rank < p.num_ranks; rank += kLanes) {
    const int64_t load = p.loads[rank];
    const uint64_t full = candidate(load, rank);
    if (full > giver) giver = full;
    if (load >= mean || p.filled[rank] == p.slots_per_rank) continue;
    const uint64_t empty = candidate(mean - load, rank);
    if (empty > taker) taker = empty;
  }
  giver = warp_max(giver);
  taker = warp_max(taker);
}

/// One warp finds the clones, one after the other, as the CPU's kernel does.
__device__ void find_clones(const ClonePlanning& p, int lane) {
  const int64_t mean = mean_load(p, lane);
  const int num_local = p.num_experts / p.num_ranks;
  while (true) {
    uint64_t giver = 0;
    uint64_t taker = 0;
    find_ranks(p, lane, mean, giver, taker);
    const int64_t surplus = static_cast<int64_t>(giver >> 16U) - mean;
    if (surplus <= mean / kCloneTolerance || taker == 0) return;
    const int from = index_of(giver);
    uint64_t largest = 0;
    for (int e = lane; e < num_local; e += kLanes) {
      const uint64_t tokens = candidate(p.rest[from * num_local + e], e);
      if (tokens > largest) largest = tokens;
    }
    largest = warp_max(largest);
    if (lane == 0) {
      const int expert = from * num_local + index_of(largest);
      const int to = index_of(taker);
      int64_t tokens = min(surplus, static_cast<int64_t>(largest >> 16U));
      tokens = min(tokens, static_cast<int64_t>(taker >> 16U));
      p.rest[expert] -= tokens;
      p.loads[from] -= tokens;
      p.loads[to] += tokens;
      const int slot = to * p.slots_per_rank + static_cast<int>(p.filled[to]++);
      p.slots[slot] = expert;
      p.quotas[slot] = tokens;
    }
    __syncwarp();
  }
}

/// Filled slots come first; they rise by expert.
__device__ void sort_slots(const ClonePlanning& p, int rank) {
  int64_t* const slots = p.slots + rank * p.slots_per_rank;
  int64_t* const quotas = p.quotas + rank * p.slots_per_rank;
  for (int64_t i = 1; i < p.filled[rank]; ++i) {
    const int64_t expert = slots[i];
    const int64_t quota = quotas[i];
    int64_t j = i;
    for (; j > 0 && slots[j - 1] > expert; --j) {
      slots[j] = slots[j - 1];
      quotas[j] = quotas[j - 1];
    }
    slots[j] = expert;
    quotas[j] = quota;
  }
}

__global__ void __launch_bounds__(kThreads) plan_clones(const __grid_constant__ ClonePlanning p) {
  wait_for_earlier();
  add_up(p);
  if (threadIdx.x < kLanes) find_clones(p, static_cast<int>(threadIdx.x));
  __syncthreads();
  for (int rank = threadIdx.x; rank < p.num_ranks; rank += kThreads) sort_slots(p, rank);
  __syncthreads();
  const CloneSplit split{.counts = p.counts,
                         .slots = p.slots,
                         .quotas = p.quotas,
                         .num_experts = p.num_experts,
                         .num_ranks = p.num_ranks,
                         .rank = p.rank,
                         .slots_per_rank = p.slots_per_rank};
  for (int slot = threadIdx.x; slot < p.num_ranks * p.slots_per_rank; slot += kThreads) {
    const CloneSplit::Range range = split.of(slot);
    p.begins[slot] = range.begin;
    p.ends[slot] = range.end;
  }
}

__global__ void __launch_bounds__(kThreads) route_clones(const __grid_constant__ CloneRouting p) {
  wait_for_earlier();
  __shared__ int64_t slots[kCloneMaxSlots];
  for (int slot = threadIdx.x; slot < p.num_slots; slot += kThreads) slots[slot] = p.slots[slot];
  __syncthreads();
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < p.num_assignments;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int expert = p.expert_idx[i];
    int found = -1;
    if (p.row_of[i] >= 0) {
      const int64_t place = p.row_of[i] - p.offsets[expert];
      for (int slot = 0; slot < p.num_slots; ++slot) {
        if (slots[slot] == expert && place >= p.begins[slot] && place < p.ends[slot]) found = slot;
      }
    }
    p.home_idx[i] = found < 0 ? expert : -1;
    p.clone_idx[i] = found;
  }
}

/// Blocks (y) have an expert each, or several; those of x share its elements.
__global__ void __launch_bounds__(kThreads) add_clones(const __grid_constant__ CloneSum p) {
  wait_for_earlier();
  for (int64_t local = blockIdx.y; local < p.num_local; local += gridDim.y) {
    int64_t returned = 0;  // blocks of this rank's experts so far
    for (int slot = 0; slot < p.num_slots; ++slot) {
      const int64_t expert = p.slots[slot] - p.first_expert;
      if (expert < 0 || expert >= p.num_local) continue;
      if (expert == local) {
        const float* from = p.returned + returned * p.block;
        float* to = p.sum + local * p.block;
        for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < p.block;
             i += static_cast<int64_t>(gridDim.x) * kThreads)
          to[i] += from[i];
      }
      ++returned;
    }
  }
}

unsigned blocks_for(int64_t count, int64_t most) {
  return static_cast<unsigned>(std::min((count + kThreads - 1) / kThreads, most));
}

}  // namespace

void launch_clone_plan(const ClonePlanning& plan, cudaStream_t stream) {
  launch_early(plan_clones, {1, kThreads}, stream, plan);
}

void launch_clone_route(const CloneRouting& routing, cudaStream_t stream) {
  const unsigned blocks = blocks_for(routing.num_assignments, 4096);
  if (blocks > 0) launch_early(route_clones, {blocks, kThreads}, stream, routing);
}

void launch_add_clones(const CloneSum& sum, cudaStream_t stream) {
  if (sum.block == 0) return;
  const dim3 grid(blocks_for(sum.block, 1024),
                  static_cast<unsigned>(std::min<int64_t>(sum.num_local, 1024)));
  launch_early(add_clones, {grid, kThreads}, stream, sum);
}

}  // namespace tessera::cuda
