#pragma once

#include "ops/router/router_kernels.h"
#include "ops/router/router_scores.cuh"

/// The statistics of all tokens, from those of their blocks.
namespace tessera::cuda {

/// The sums over a block of kWarps warps, in one order, to its first warp.
template <int kWarps, int kCount>
__device__ __forceinline__ void add_threads(double (&values)[kCount]) {
  __shared__ double scratch[kWarps][kCount];
  const int lane = threadIdx.x % kLanes;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    values[i] = warp_sum(values[i]);
    if (lane == 0) scratch[threadIdx.x / kLanes][i] = values[i];
  }
  __syncthreads();
  if (threadIdx.x >= kLanes) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    values[i] = warp_sum(kWarps == kLanes || lane < kWarps ? scratch[lane][i] : 0.0);
}

/// By a block of kWarps warps: what the totals say. Thread e has those of expert e; what the
/// threads have of z is added up. `counts_E` is shared memory for the experts.
template <int kWarps>
__device__ __forceinline__ void write_totals(const RouterTotals& p, double share, float count,
                                             double z, float* counts_E) {
  const int e = threadIdx.x;
  const auto num_tokens = static_cast<double>(max(p.num_tokens, int64_t{1}));
  if (e < p.num_experts) {
    p.score_means_E[e] = static_cast<float>(share / num_tokens);
    p.counts_E[e] = count;
    counts_E[e] = count;
  }
  __syncthreads();
  // Of assignments, of squared log-sum-exps, and of assignments · shares.
  double sums[] = {0, z, 0};
  if (e < p.num_experts) {
    double group = 0;
    const int first = e / p.group_size * p.group_size;
    for (int i = first; i < first + p.group_size; ++i) group += static_cast<double>(counts_E[i]);
    sums[0] = static_cast<double>(counts_E[e]);
    sums[2] = group * share;
  }
  add_threads<kWarps>(sums);
  if (e != 0) return;
  *p.z_loss = static_cast<float>(sums[1] / num_tokens);
  if (p.balance_loss == nullptr) return;
  const int num_groups = p.num_experts / p.group_size;
  *p.balance_loss =
      sums[0] > 0 ? static_cast<float>(num_groups * sums[2] / (sums[0] * num_tokens)) : 0.0F;
}

/// What launch_router_totals does of few tokens and experts, in the same order of sums, by one
/// block of a kernel whose other blocks may just have left their statistics: a warp takes what a
/// part of that launch does, a lane an expert.
__device__ __forceinline__ void add_few_totals(const RouterTotals& p) {
  constexpr int kWarps = kRouterTotalParts;
  static_assert(kRouterFewExperts <= kLanes);
  static_assert(router_blocks(kRouterFewTokens) <= kWarps * kLanes);
  __shared__ double shares[kWarps][kLanes];
  __shared__ int32_t counts[kWarps][kLanes];
  __shared__ float counts_E[kLanes];
  const int thread = threadIdx.x;
  const int lane = thread % kLanes;
  const int part = thread / kLanes;
  const auto num_blocks = static_cast<int>(router_blocks(p.num_tokens));
  double share = 0;
  int32_t count = 0;
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    const int block = part * kLanes + i;
    const bool is_there = block < num_blocks && lane < p.num_experts;
    share +=
        is_there ? static_cast<double>(__ldcg(p.share_sums + block * p.num_experts + lane)) : 0.0;
    count += is_there ? __ldcg(p.counts + block * p.num_experts + lane) : 0;
  }
  shares[part][lane] = share;
  counts[part][lane] = count;
  const double z = thread < num_blocks ? __ldcg(p.z_sums + thread) : 0.0;
  __syncthreads();
  share = 0;
  count = 0;
  if (thread < p.num_experts) {
#pragma unroll
    for (int other = 0; other < kWarps; ++other) {
      share += shares[other][thread];
      count += counts[other][thread];
    }
  }
  write_totals<kWarps>(p, share, static_cast<float>(count), z, counts_E);
}

/// Whether this is the last block of the launch to call it; then it sees what the others wrote
/// before, if it reads past the L1 cache. `counter` is zero before and after the launch.
__device__ __forceinline__ bool is_last_block(unsigned* counter) {
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(counter, 1U) == gridDim.x - 1;
    if (is_last) *counter = 0;
  }
  __syncthreads();
  __threadfence();
  return is_last;
}

}  // namespace tessera::cuda
