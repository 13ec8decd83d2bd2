#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/noise.h"
#include "ops/sinkhorn/sinkhorn_kernels.h"
#include "ops/sinkhorn/sinkhorn_rule.h"

namespace tessera::cuda {
namespace {

constexpr unsigned kAllLanes = 0xFFFFFFFFU;
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlockTokens = kSinkhornBlock;
constexpr int kUpdateThreads = 1024;
static_assert(kSinkhornMaxExperts <= kUpdateThreads, "a thread for each expert");

__device__ __forceinline__ double sum_doubles(double value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}
__device__ __forceinline__ int64_t own_warp() {
  return static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
}

/// Scores of all tokens, a warp each, and factors of 1. Where nothing is trained, all is done.
__global__ void __launch_bounds__(kThreads) start(const __grid_constant__ SinkhornCall call) {
  wait_for_earlier();
  if (blockIdx.x == 0) {
    for (int e = threadIdx.x; e < call.num_experts; e += kThreads) call.factors_E[e] = 1;
    if (threadIdx.x == 0) *call.done = call.noise[kNoiseTraining] == 0 ? 1 : 0;
  }
  const int64_t token = own_warp();
  if (token >= call.num_tokens) return;
  const int lane = threadIdx.x % 32;
  const int64_t row = token * call.num_experts;
  float largest = -INFINITY;
  for (int e = lane; e < call.num_experts; e += 32)
    largest = fmaxf(largest, call.logits_TE[row + e]);
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, step));
  for (int e = lane; e < call.num_experts; e += 32)
    call.scores_TE[row + e] = expf(call.logits_TE[row + e] - largest);
}

/// A block's sums over its tokens of their scores times their factors.
__global__ void __launch_bounds__(kThreads) sum_blocks(const __grid_constant__ SinkhornCall call) {
  wait_for_earlier();
  if (*call.done != 0) return;
  __shared__ double factors[kBlockTokens];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kBlockTokens;
  const int lane = threadIdx.x % 32;
  for (int t = static_cast<int>(threadIdx.x) / 32; t < kBlockTokens; t += kWarps) {
    if (first + t >= call.num_tokens) break;
    const float* const scores = call.scores_TE + (first + t) * call.num_experts;
    double of_token = 0;
    for (int e = lane; e < call.num_experts; e += 32)
      of_token += call.factors_E[e] * static_cast<double>(scores[e]);
    of_token = sum_doubles(of_token);
    if (lane == 0)
      factors[t] = 1 / (static_cast<double>(call.num_tokens) * (of_token + kSinkhornEpsilon));
  }
  __syncthreads();
  const int64_t left = call.num_tokens - first;
  const int count = left < kBlockTokens ? static_cast<int>(left) : kBlockTokens;
  for (int e = threadIdx.x; e < call.num_experts; e += kThreads) {
    double sum = 0;
    for (int t = 0; t < count; ++t)
      sum += factors[t] * static_cast<double>(call.scores_TE[(first + t) * call.num_experts + e]);
    call.partials[static_cast<int64_t>(blockIdx.x) * call.num_experts + e] = sum;
  }
}

/// One block: the experts' factors of all blocks' sums, each expert's taken by as many threads as
/// there are for it.
__global__ void __launch_bounds__(kUpdateThreads)
    update_factors(const __grid_constant__ SinkhornCall call, int64_t num_blocks) {
  wait_for_earlier();
  if (*call.done != 0) return;
  __shared__ double sums[kUpdateThreads];
  __shared__ double changes[kUpdateThreads / 32];
  const int parts = kUpdateThreads / call.num_experts;
  const int e = static_cast<int>(threadIdx.x) % call.num_experts;
  const int part = static_cast<int>(threadIdx.x) / call.num_experts;
  double sum = 0;
  if (part < parts) {
    for (int64_t block = part; block < num_blocks; block += parts)
      sum += call.partials[block * call.num_experts + e];
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  double change = 0;
  if (part == 0) {
    for (int other = 1; other < parts; ++other) sum += sums[other * call.num_experts + e];
    const double factor = 1 / (static_cast<double>(call.num_experts) * (sum + kSinkhornEpsilon));
    change = fabs(factor - call.factors_E[e]);
    call.factors_E[e] = factor;
  }
  change = sum_doubles(change);
  if (threadIdx.x % 32 == 0) changes[threadIdx.x / 32] = change;
  __syncthreads();
  if (threadIdx.x != 0) return;
  double total = 0;
  for (const double of_warp : changes) total += of_warp;
  if (total / call.num_experts <= kSinkhornTolerance) *call.done = 1;
}

/// What an expert is compared by, and whether it comes before another one.
struct Candidate {
  double key;
  int expert;

  __device__ __forceinline__ bool comes_before(const Candidate& other) const {
    return key > other.key || (key == other.key && expert < other.expert);
  }
};

/// A warp has a token: the best expert behind the last one chosen, K times.
__global__ void __launch_bounds__(kThreads) choose(const __grid_constant__ SinkhornCall call) {
  wait_for_earlier();
  const int64_t token = own_warp();
  if (token >= call.own_tokens) return;
  const int lane = threadIdx.x % 32;
  int32_t* const expert_idx = call.expert_idx + token * call.top_k;
  if (call.noise[kNoiseTraining] == 0) {
    for (int k = lane; k < call.top_k; k += 32) expert_idx[k] = -1;
    return;
  }
  const float* const scores = call.scores_TE + (call.first_own + token) * call.num_experts;
  Candidate last = {INFINITY, -1};
  for (int k = 0; k < call.top_k; ++k) {
    Candidate best = {-INFINITY, kSinkhornMaxExperts};
    for (int e = lane; e < call.num_experts; e += 32) {
      const double value = call.factors_E[e] * static_cast<double>(scores[e]);
      const Candidate candidate = {isnan(value) ? -INFINITY : value, e};
      if (last.comes_before(candidate) && candidate.comes_before(best)) best = candidate;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const Candidate other = {__shfl_xor_sync(kAllLanes, best.key, step),
                               __shfl_xor_sync(kAllLanes, best.expert, step)};
      if (other.comes_before(best)) best = other;
    }
    if (lane == 0) expert_idx[k] = best.expert;
    last = best;
  }
}

LaunchShape warps_for(int64_t tokens) {
  return {static_cast<unsigned>(divide_up(tokens, kWarps)), kThreads};
}

}  // namespace

void launch_sinkhorn(const SinkhornCall& call, cudaStream_t stream) {
  if (call.own_tokens == 0) return;
  launch_early(start, warps_for(call.num_tokens), stream, call);
  const int64_t num_blocks = sinkhorn_blocks(call.num_tokens);
  for (int step = 0; step < kSinkhornSteps; ++step) {
    launch_early(sum_blocks, {static_cast<unsigned>(num_blocks), kThreads}, stream, call);
    launch_early(update_factors, {1, kUpdateThreads}, stream, call, num_blocks);
  }
  launch_early(choose, warps_for(call.own_tokens), stream, call);
}

}  // namespace tessera::cuda
