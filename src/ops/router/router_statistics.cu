// What the router says of all tokens together: counts, score means and losses.
#include "ops/router/router_kernels.h"
#include "ops/router/router_scores.cuh"

namespace tessera::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kRouterMaxExperts;  // one to an expert
constexpr int kSegmentThreads = 512;

/// A warp's lanes are 32 experts, its warps take every 32nd block.
__global__ void __launch_bounds__(1024) add_blocks(const RouterSums p) {
  __shared__ double share_sums[kLanes][kLanes];
  __shared__ int64_t counts[kLanes][kLanes];
  const int lane = threadIdx.x;
  const int warp = threadIdx.y;
  const int expert = blockIdx.x * kLanes + lane;
  const int64_t num_blocks = router_blocks(p.num_tokens);
  double sum = 0;
  int64_t count = 0;
  if (expert < p.num_experts) {
#pragma unroll 4
    for (int64_t block = warp; block < num_blocks; block += kLanes) {
      sum += static_cast<double>(p.share_sums[block * p.num_experts + expert]);
      count += p.counts[block * p.num_experts + expert];
    }
  }
  share_sums[warp][lane] = sum;
  counts[warp][lane] = count;
  __syncthreads();
  if (warp != 0 || expert >= p.num_experts) return;
  for (int w = 1; w < kLanes; ++w) {
    sum += share_sums[w][lane];
    count += counts[w][lane];
  }
  p.share_totals_E[expert] = sum;
  p.score_means_E[expert] = static_cast<float>(sum / static_cast<double>(max(p.num_tokens, 1L)));
  p.counts_E[expert] = static_cast<float>(count);
}

/// Writes the fractions that counts in shared memory stand for.
template <int kBlock>
__device__ void write_fractions(float* counts_E, int num_experts, int group_size, double* scratch,
                                float* fractions_E) {
  double mine = 0;
  for (int e = threadIdx.x; e < num_experts; e += kBlock) mine += counts_E[e];
  const auto sum = static_cast<float>(block_sum<kBlock>(mine, scratch));
  const float scale = sum > 0 ? 1.0F / sum : 0.0F;
  for (int e = threadIdx.x; e < num_experts; e += kBlock) {
    const int first = e / group_size * group_size;
    float group = 0;
    for (int i = first; i < first + group_size; ++i) group += counts_E[i] * scale;
    fractions_E[e] = group;
  }
}

__global__ void __launch_bounds__(kThreads) make_fractions(const RouterFractions p) {
  __shared__ float counts_E[kRouterMaxExperts];
  __shared__ double scratch[kThreads / kLanes];
  const int e = threadIdx.x;
  if (e < p.num_experts)
    counts_E[e] = p.counts_E[e] + (p.prior_counts_E == nullptr ? 0.0F : p.prior_counts_E[e]);
  __syncthreads();
  write_fractions<kThreads>(counts_E, p.num_experts, p.group_size, scratch, p.fractions_E);
}

__global__ void __launch_bounds__(kSegmentThreads)
    make_segment_fractions(const SegmentFractions p) {
  __shared__ int32_t counts[kRouterMaxExperts];
  __shared__ float counts_E[kRouterMaxExperts];
  __shared__ double scratch[kSegmentThreads / kLanes];
  for (int e = threadIdx.x; e < p.num_experts; e += kSegmentThreads) counts[e] = 0;
  __syncthreads();
  const int64_t segment = blockIdx.x;
  const int64_t last = min(static_cast<int64_t>(p.cu_seqlens[segment + 1]), p.num_tokens) * p.top_k;
  for (int64_t i = static_cast<int64_t>(p.cu_seqlens[segment]) * p.top_k + threadIdx.x; i < last;
       i += kSegmentThreads)
    atomicAdd(&counts[p.expert_idx_TK[i]], 1);
  __syncthreads();
  for (int e = threadIdx.x; e < p.num_experts; e += kSegmentThreads)
    counts_E[e] = static_cast<float>(counts[e]);
  __syncthreads();
  write_fractions<kSegmentThreads>(counts_E, p.num_experts, p.group_size, scratch,
                                   p.fractions_SE + segment * p.num_experts);
}

template <int kPer>
__global__ void __launch_bounds__(kWarps* kLanes) add_segment_balance(const SegmentBalance p) {
  __shared__ double sums[kWarps];
  const int warp = threadIdx.x / kLanes;
  const TokenScores<kPer> scores{p.num_experts, static_cast<int>(threadIdx.x) % kLanes};
  constexpr int kTokensPerWarp = kRouterBlockTokens / kWarps;
  const int64_t first =
      static_cast<int64_t>(blockIdx.x) * kRouterBlockTokens + warp * kTokensPerWarp;
  const int64_t last = min(first + kTokensPerWarp, p.num_tokens);
  double sum = 0;
  for (int64_t token = first; token < last; ++token) {
    float logits[kPer], shares[kPer], fractions[kPer];
    scores.load(p.logits_TE + token * p.num_experts, logits);
    scores.shares(p.sigmoid, logits, shares);
    const int64_t segment = segment_of(p.cu_seqlens, p.num_segments, token);
    scores.load(p.fractions_SE + segment * p.num_experts, fractions);
#pragma unroll
    for (int i = 0; i < kPer; ++i)
      sum += static_cast<double>(fractions[i]) * static_cast<double>(shares[i]);
  }
  sum = warp_sum(sum);
  if (scores.lane == 0) sums[warp] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kWarps; ++w) sum += sums[w];
  p.balance_sums[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads) make_losses(const RouterLosses p) {
  __shared__ double scratch[kThreads / kLanes];
  const int64_t num_blocks = router_blocks(p.num_tokens);
  double balance = 0;
  double z = 0;
  for (int64_t block = threadIdx.x; block < num_blocks; block += kThreads) {
    z += p.z_sums[block];
    if (p.balance_sums != nullptr) balance += p.balance_sums[block];
  }
  const int e = threadIdx.x;
  if (p.balance_sums == nullptr && e < p.num_experts)
    balance = static_cast<double>(p.fractions_E[e]) * p.share_totals_E[e];
  balance = block_sum<kThreads>(balance, scratch);
  z = block_sum<kThreads>(z, scratch);
  if (threadIdx.x != 0) return;
  const auto num_tokens = static_cast<double>(max(p.num_tokens, 1L));
  const int num_groups = p.num_experts / p.group_size;
  *p.balance_loss = static_cast<float>(num_groups * balance / num_tokens);
  *p.z_loss = static_cast<float>(z / num_tokens);
}

}  // namespace

void launch_router_sums(const RouterSums& sums, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((sums.num_experts + kLanes - 1) / kLanes);
  add_blocks<<<blocks, dim3(kLanes, kLanes), 0, stream>>>(sums);
}

void launch_router_fractions(const RouterFractions& fractions, cudaStream_t stream) {
  make_fractions<<<1, kThreads, 0, stream>>>(fractions);
}

void launch_segment_fractions(const SegmentFractions& fractions, cudaStream_t stream) {
  if (fractions.num_segments == 0) return;
  make_segment_fractions<<<static_cast<unsigned>(fractions.num_segments), kSegmentThreads, 0,
                           stream>>>(fractions);
}

void launch_segment_balance(const SegmentBalance& balance, cudaStream_t stream) {
  if (balance.num_tokens == 0) return;
  const auto blocks = static_cast<unsigned>(router_blocks(balance.num_tokens));
  with_experts_per_lane(balance.num_experts, [&]<int kPer>() {
    add_segment_balance<kPer><<<blocks, kWarps * kLanes, 0, stream>>>(balance);
  });
}

void launch_router_losses(const RouterLosses& losses, cudaStream_t stream) {
  make_losses<<<1, kThreads, 0, stream>>>(losses);
}

}  // namespace tessera::cuda
