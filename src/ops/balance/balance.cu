#include "ops/balance/balance_kernels.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/fail.cuh"
#include "ops/router/router_scores.cuh"

namespace tessera::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kLanes;
constexpr int kOneBlock = 1024;
/// Blocks that the sums are cut into at least, where tokens allow it: some for every SM
/// of any Hopper GPU. The same on all, since it decides the order of sums.
constexpr int64_t kWantedBlocks = 288;
constexpr int64_t kLeastRun = 32;  // tokens

/// A block adds up the tokens of one segment (x) in one run (y): warp by warp, then the warps'.
template <int kPer>
__global__ void __launch_bounds__(kThreads) add_tokens(const BalanceSums p) {
  wait_for_earlier();
  extern __shared__ double sums[];
  const int64_t segment = blockIdx.x;
  const int warp = threadIdx.x / kLanes;
  const TokenScores<kPer> scores{p.num_experts, static_cast<int>(threadIdx.x) % kLanes};
  int32_t* counts = reinterpret_cast<int32_t*>(sums + p.num_experts);
  for (int e = threadIdx.x; e < p.num_experts; e += kThreads) {
    sums[e] = 0;
    counts[e] = 0;
  }
  __syncthreads();
  const int64_t per_run = (p.num_tokens + p.num_runs - 1) / p.num_runs;
  const int64_t first = blockIdx.y * per_run;
  const int64_t last = min(first + per_run, p.num_tokens);
  double mine[kPer] = {};
  for (int64_t token = first + warp; token < last; token += kWarps) {
    const int32_t its_segment = p.segments_T[token];
    if (its_segment < 0 || its_segment >= p.num_segments)
      fail("balance_statistics: no such segment", its_segment);
    if (its_segment != segment) continue;
    float shares[kPer];
    scores.load_logits(p.logits_TE + token * p.num_experts, shares);
    scores.shares(p.score, shares, shares);
#pragma unroll
    for (int i = 0; i < kPer; ++i) mine[i] += static_cast<double>(shares[i]);
    for (int k = scores.lane; k < p.top_k; k += kLanes) {
      const int32_t expert = p.expert_idx_TK[token * p.top_k + k];
      if (expert < -1 || expert >= p.num_experts)
        fail("balance_statistics: no such expert", expert);
      if (expert >= 0) atomicAdd(&counts[expert], 1);
    }
  }
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) {
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        if (scores.has(i)) sums[scores.expert(i)] += mine[i];
      }
    }
    __syncthreads();
  }
  const int64_t row = (blockIdx.y * p.num_segments + segment) * p.num_experts;
  for (int e = threadIdx.x; e < p.num_experts; e += kThreads) {
    p.partial_sums[row + e] = sums[e];
    p.partial_counts[row + e] = counts[e];
  }
}

__global__ void __launch_bounds__(kThreads) add_runs(const BalanceSums p) {
  wait_for_earlier();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t count = p.num_segments * p.num_experts;
  if (i >= count) return;
  double sum = 0;
  int64_t assignments = 0;
#pragma unroll 8
  for (int run = 0; run < p.num_runs; ++run) {
    sum += p.partial_sums[run * count + i];
    assignments += p.partial_counts[run * count + i];
  }
  p.score_sums_GE[i] = static_cast<float>(sum);
  p.counts_GE[i] = static_cast<float>(assignments);
}

template <int kPer>
__global__ void __launch_bounds__(kThreads) backward_tokens(const BalanceSumsBackward p) {
  wait_for_earlier();
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes;
  if (token >= p.num_tokens) return;
  const TokenScores<kPer> scores{p.num_experts, static_cast<int>(threadIdx.x) % kLanes};
  float logits[kPer], shares[kPer], weights[kPer];
  scores.load_logits(p.logits_TE + token * p.num_experts, logits);
  scores.load(p.grad_sums_GE + static_cast<int64_t>(p.segments_T[token]) * p.num_experts, weights);
  const float sum = scores.shares(p.score, logits, shares);
  const float mean = scores.dot(shares, weights);
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    // Scores of one logit each are s = q · sum.
    const float slope =
        p.score == ScoreFunction::kSoftmax ? 1.0F : relative_slope(p.score, shares[i] * sum);
    if (scores.has(i))
      p.grad_logits_TE[token * p.num_experts + scores.expert(i)] =
          shares[i] * slope * (weights[i] - mean);
  }
}

__global__ void __launch_bounds__(kThreads) make_fractions(const BalanceFractions p) {
  wait_for_earlier();
  __shared__ float counts_E[kBalanceMaxExperts];
  __shared__ double scratch[kWarps];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * p.num_experts;
  double mine = 0;
  for (int e = threadIdx.x; e < p.num_experts; e += kThreads) {
    counts_E[e] = p.counts_GE[row + e] + (p.prior_counts_E == nullptr ? 0.0F : p.prior_counts_E[e]);
    mine += static_cast<double>(counts_E[e]);
  }
  const auto sum = static_cast<float>(block_sum<kThreads>(mine, scratch));
  const float unit = sum > 0 ? 1.0F / sum : 0.0F;
  const float factor =
      p.grad == nullptr ? 1.0F : static_cast<float>(static_cast<double>(*p.grad) * p.scale);
  for (int e = threadIdx.x; e < p.num_experts; e += kThreads) {
    const int first = e / p.group_size * p.group_size;
    float group = 0;
    for (int i = first; i < first + p.group_size; ++i) group += counts_E[i] * unit;
    p.fractions_GE[row + e] = group * factor;
  }
}

__global__ void __launch_bounds__(kOneBlock) make_loss(const BalanceDot p) {
  wait_for_earlier();
  __shared__ double scratch[kOneBlock / kLanes];
  double sum = 0;
  for (int64_t i = threadIdx.x; i < p.count; i += kOneBlock)
    sum += static_cast<double>(p.fractions_GE[i]) * static_cast<double>(p.score_sums_GE[i]);
  sum = block_sum<kOneBlock>(sum, scratch);
  if (threadIdx.x == 0) *p.loss = static_cast<float>(p.scale * sum);
}

int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

/// One thread an expert; `after` may be `earlier`, which is read first.
__global__ void add_counts(RunningSums sums) {
  wait_for_earlier();
  const int expert = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (expert >= sums.num_experts) return;
  float sum = sums.earlier_E[expert];
  for (int rank = 0; rank < sums.num_ranks; ++rank) {
    if (rank == sums.rank) sums.before_E[expert] = sum;
    sum += sums.counts_RE[static_cast<int64_t>(rank) * sums.num_experts + expert];
  }
  sums.after_E[expert] = sum;
}

}  // namespace

int balance_runs(int64_t num_tokens, int64_t num_segments) {
  const int64_t wanted = divide_up(kWantedBlocks, num_segments);
  const int64_t most = divide_up(num_tokens, kLeastRun);
  const int64_t runs = wanted < most ? wanted : most;
  return static_cast<int>(runs < 1 ? 1 : runs);
}

void launch_balance_sums(const BalanceSums& sums, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(sums.num_segments), static_cast<unsigned>(sums.num_runs));
  const size_t num_bytes =
      static_cast<size_t>(sums.num_experts) * (sizeof(double) + sizeof(int32_t));
  with_experts_per_lane(sums.num_experts, [&]<int kPer>() {
    launch_early(add_tokens<kPer>, {grid, kThreads, num_bytes}, stream, sums);
  });
  const int64_t count = sums.num_segments * sums.num_experts;
  launch_early(add_runs, {static_cast<unsigned>(divide_up(count, kThreads)), kThreads}, stream,
               sums);
}

void launch_balance_sums_backward(const BalanceSumsBackward& backward, cudaStream_t stream) {
  if (backward.num_tokens == 0) return;
  const auto blocks = static_cast<unsigned>(divide_up(backward.num_tokens, kWarps));
  with_experts_per_lane(backward.num_experts, [&]<int kPer>() {
    launch_early(backward_tokens<kPer>, {blocks, kThreads}, stream, backward);
  });
}

void launch_balance_fractions(const BalanceFractions& fractions, cudaStream_t stream) {
  launch_early(make_fractions, {static_cast<unsigned>(fractions.num_segments), kThreads}, stream,
               fractions);
}

void launch_balance_dot(const BalanceDot& dot, cudaStream_t stream) {
  launch_early(make_loss, {1, kOneBlock}, stream, dot);
}

void launch_running_counts(const RunningSums& sums, cudaStream_t stream) {
  launch_early(add_counts, {static_cast<unsigned>(divide_up(sums.num_experts, kThreads)), kThreads},
               stream, sums);
}

}  // namespace tessera::cuda
