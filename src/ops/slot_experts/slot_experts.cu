#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/fail.cuh"
#include "ops/slot_experts/slot_experts_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostSlots = 65535;  // of a grid's second dim

/// Where each expert's rows of a slot end, by one thread's sum: experts are few.
__device__ void find_ends(const SlotFilling& p, int64_t slot, int64_t* ends) {
  const int64_t* counts = p.counts + slot * p.num_experts;
  for (int e = threadIdx.x; e < p.num_experts; e += kThreads) ends[e] = counts[e];
  __syncthreads();
  if (threadIdx.x == 0) {
    int64_t end = 0;
    for (int e = 0; e < p.num_experts; ++e) {
      if (ends[e] < 0) fail("slot_experts: a count is negative", ends[e]);
      end += ends[e];
      ends[e] = end;
    }
    if (end > p.slot_rows) fail("slot_experts: a slot gets more rows than it has", end);
  }
  __syncthreads();
}

/// The first expert whose rows end behind `row`, -1 where there is none.
__device__ int find_expert(const int64_t* ends, int num_experts, int64_t row) {
  int low = 0;
  int high = num_experts;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (ends[middle] > row) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low < num_experts ? low : -1;
}

/// Blocks (x) share the rows of a slot (y).
__global__ void __launch_bounds__(kThreads) write_experts(const SlotFilling p) {
  wait_for_earlier();
  __shared__ int64_t ends[kSlotMaxExperts];
  for (int64_t slot = blockIdx.y; slot < p.num_slots; slot += gridDim.y) {
    find_ends(p, slot, ends);
    for (int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; row < p.slot_rows;
         row += static_cast<int64_t>(gridDim.x) * kThreads)
      p.expert_of[slot * p.slot_rows + row] = find_expert(ends, p.num_experts, row);
    __syncthreads();  // all have read before the next slot's ends are written
  }
}

}  // namespace

void launch_slot_experts(const SlotFilling& filling, cudaStream_t stream) {
  const int64_t blocks = (filling.slot_rows + kThreads - 1) / kThreads;
  if (blocks == 0 || filling.num_slots == 0) return;
  const dim3 grid(
      static_cast<unsigned>(blocks < 64 ? blocks : 64),
      static_cast<unsigned>(filling.num_slots < kMostSlots ? filling.num_slots : kMostSlots));
  launch_early(write_experts, {grid, kThreads}, stream, filling);
}

}  // namespace tessera::cuda
