// Small integers, a thread for each: nothing here takes time beside the rows that follow.
#include "ops/cuda/dependent_launch.cuh"
#include "ops/destinations/destinations_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 4096;

__device__ __forceinline__ int64_t actual(const int64_t* extent, int64_t bound) {
  return extent == nullptr ? bound : *extent;
}

__device__ __forceinline__ int32_t member_of(const DestinationChoice& p, int64_t expert) {
  const int64_t offset = expert - p.first_expert;
  if (expert < 0 || offset < 0) return -1;
  const int64_t member = offset / p.experts_each;
  return member < p.members ? static_cast<int32_t>(member) : -1;
}

__global__ void __launch_bounds__(kThreads) choose_members(const DestinationChoice p) {
  wait_for_earlier();
  const int64_t count = actual(p.token_extent, p.num_tokens) * p.top_k;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int k = static_cast<int>(i % p.top_k);
    const int32_t member = member_of(p, p.expert_idx[i]);
    bool repeats = false;
    for (int earlier = 1; earlier <= k; ++earlier)
      repeats = repeats || member_of(p, p.expert_idx[i - earlier]) == member;
    p.members_TK[i] = repeats ? -1 : member;
  }
}

__global__ void __launch_bounds__(kThreads) copy_choices(const ChoicesOfRows p) {
  wait_for_earlier();
  const int64_t count = actual(p.row_extent, p.num_rows) * p.top_k;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int32_t source = p.source_R[i / p.top_k];
    p.choices_RK[i] =
        source < 0 ? -1
                   : p.expert_idx[static_cast<int64_t>(source / p.top_k) * p.top_k + i % p.top_k];
  }
}

/// Blocks for so many values; 0: nothing to do.
unsigned blocks_for(int64_t count) {
  const int64_t blocks = (count + kThreads - 1) / kThreads;
  return static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks);
}

}  // namespace

void launch_destinations(const DestinationChoice& choice, cudaStream_t stream) {
  const unsigned blocks = blocks_for(choice.num_tokens * choice.top_k);
  if (blocks > 0) launch_early(choose_members, {blocks, kThreads}, stream, choice);
}

void launch_permute_choices(const ChoicesOfRows& choices, cudaStream_t stream) {
  const unsigned blocks = blocks_for(choices.num_rows * choices.top_k);
  if (blocks > 0) launch_early(copy_choices, {blocks, kThreads}, stream, choices);
}

}  // namespace tessera::cuda
