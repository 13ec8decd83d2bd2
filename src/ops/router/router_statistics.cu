// What the router says of all tokens together: counts, score means and losses.
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/ptx/barrier.cuh"
#include "ops/cuda/short_kernel.cuh"
#include "ops/router/router_kernels.h"
#include "ops/router/router_scores.cuh"
#include "ops/router/router_totals.cuh"

namespace tessera::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kRouterMaxExperts;  // one to an expert
constexpr int kSegmentThreads = 512;
constexpr int kTotalThreads = 1024;
constexpr int kTotalWarps = kTotalThreads / kLanes;

/// Writes the fractions that counts in shared memory stand for.
template <int kBlock>
__device__ void write_fractions(float* counts_E, int num_experts, int group_size, double* scratch,
                                float* fractions_E) {
  double mine = 0;
  for (int e = threadIdx.x; e < num_experts; e += kBlock) mine += counts_E[e];
  const auto sum = static_cast<float>(block_sum<kBlock>(mine, scratch));
  for (int e = threadIdx.x; e < num_experts; e += kBlock)
    fractions_E[e] = group_fraction(counts_E, e, group_size, sum);
}

__global__ void __launch_bounds__(kThreads) make_fractions(const RouterFractions p) {
  wait_for_earlier();
  let_next_begin_if_short();
  __shared__ float counts_E[kRouterMaxExperts];
  __shared__ double scratch[kThreads / kLanes];
  const int e = threadIdx.x;
  if (e < p.num_experts) counts_E[e] = p.counts_E[e];
  __syncthreads();
  write_fractions<kThreads>(counts_E, p.num_experts, p.group_size, scratch, p.fractions_E);
}

__global__ void __launch_bounds__(kSegmentThreads)
    make_segment_fractions(const SegmentFractions p) {
  wait_for_earlier();
  let_next_begin_if_short();
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
  wait_for_earlier();
  let_next_begin_if_short();
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
    scores.load_logits(p.logits_TE + token * p.num_experts, logits);
    scores.shares(p.score, logits, shares);
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

/// This part's sums over blocks: a warp's lanes are 32 experts, and warps with the same experts, of
/// all parts, take every n-th block.
__device__ __forceinline__ void add_blocks(const RouterTotals& p) {
  __shared__ double shares[kTotalWarps][kLanes];
  __shared__ int32_t counts[kTotalWarps][kLanes];
  const int lane = threadIdx.x % kLanes;
  const int warp = threadIdx.x / kLanes;
  const int groups = (p.num_experts + kLanes - 1) / kLanes;
  const int own_turns = kTotalWarps / groups;
  const int turn = warp / groups;
  const int expert = warp % groups * kLanes + lane;
  double share = 0;
  int32_t count = 0;
  if (turn < own_turns && expert < p.num_experts) {
    const auto num_blocks = static_cast<int>(router_blocks(p.num_tokens));
    const int step = kRouterTotalParts * own_turns;
    const int first = static_cast<int>(blockIdx.x) * own_turns + turn;
    int64_t at = static_cast<int64_t>(first) * p.num_experts + expert;
#pragma unroll 8
    for (int block = first; block < num_blocks; block += step) {
      share += static_cast<double>(p.share_sums[at]);
      count += p.counts[at];
      at += static_cast<int64_t>(step) * p.num_experts;
    }
  }
  shares[warp][lane] = share;
  counts[warp][lane] = count;
  __syncthreads();
  if (turn != 0 || expert >= p.num_experts) return;
  for (int other = 1; other < own_turns; ++other) {
    share += shares[other * groups + warp][lane];
    count += counts[other * groups + warp][lane];
  }
  p.share_parts[blockIdx.x * p.num_experts + expert] = share;
  p.count_parts[blockIdx.x * p.num_experts + expert] = count;
}

/// One expert's sum over parts, each thread having its own.
template <typename T>
__device__ __forceinline__ T add_parts(const T* parts_E, int num_experts) {
  T sum = 0;
  if (threadIdx.x >= num_experts) return sum;
#pragma unroll
  for (int part = 0; part < kRouterTotalParts; ++part)
    sum += __ldcg(parts_E + part * num_experts + threadIdx.x);
  return sum;
}

/// One cluster, whose first block adds the parts up.
__global__ void __cluster_dims__(kRouterTotalParts, 1, 1) __launch_bounds__(kTotalThreads)
    add_totals(const RouterTotals p) {
  wait_for_earlier();
  let_next_begin_if_short();
  __shared__ float counts_E[kRouterMaxExperts];
  const int e = threadIdx.x;
  double z = 0;
  if (blockIdx.x == 0) {
    for (int64_t block = e; block < router_blocks(p.num_tokens); block += kTotalThreads)
      z += p.z_sums[block];
  }
  add_blocks(p);
  __threadfence();
  __syncthreads();
  sync_cluster();
  if (blockIdx.x != 0) return;
  __syncthreads();

  const double share = add_parts(p.share_parts, p.num_experts);
  const auto count = static_cast<float>(add_parts(p.count_parts, p.num_experts));
  write_totals<kTotalWarps>(p, share, count, z, counts_E);
}

__global__ void __launch_bounds__(kTotalThreads) add_segment_losses(const SegmentLoss p) {
  wait_for_earlier();
  let_next_begin_if_short();
  __shared__ double scratch[kTotalWarps];
  double balance = 0;
  for (int64_t block = threadIdx.x; block < router_blocks(p.num_tokens); block += kTotalThreads)
    balance += p.balance_sums[block];
  balance = block_sum<kTotalThreads>(balance, scratch);
  if (threadIdx.x != 0) return;
  const auto num_tokens = static_cast<double>(max(p.num_tokens, int64_t{1}));
  *p.balance_loss = static_cast<float>(p.num_groups * balance / num_tokens);
}

}  // namespace

void launch_router_totals(const RouterTotals& totals, cudaStream_t stream) {
  launch_early(add_totals, {kRouterTotalParts, kTotalThreads}, stream, totals);
}

void launch_router_fractions(const RouterFractions& fractions, cudaStream_t stream) {
  launch_early(make_fractions, {1, kThreads}, stream, fractions);
}

void launch_segment_fractions(const SegmentFractions& fractions, cudaStream_t stream) {
  if (fractions.num_segments == 0) return;
  launch_early(make_segment_fractions,
               {static_cast<unsigned>(fractions.num_segments), kSegmentThreads}, stream, fractions);
}

void launch_segment_balance(const SegmentBalance& balance, cudaStream_t stream) {
  if (balance.num_tokens == 0) return;
  const auto blocks = static_cast<unsigned>(router_blocks(balance.num_tokens));
  with_experts_per_lane(balance.num_experts, [&]<int kPer>() {
    launch_early(add_segment_balance<kPer>, {blocks, kWarps * kLanes}, stream, balance);
  });
}

void launch_segment_loss(const SegmentLoss& loss, cudaStream_t stream) {
  launch_early(add_segment_losses, {1, kTotalThreads}, stream, loss);
}

}  // namespace tessera::cuda
