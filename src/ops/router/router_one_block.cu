// All that the router does of so few tokens that launches would take most of the time.
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/router/router_block.cuh"
#include "ops/router/router_kernels.h"
#include "ops/router/router_totals.cuh"

namespace tessera::cuda {
namespace {

/// Tokens whose logits a thread block makes side by side.
constexpr int kLogitsAtOnce = 8;

/// By a thread block: the logits of one expert for all tokens, a dot product of F32 each.
template <int kWarps>
__device__ __forceinline__ void make_logits(const RouterLogits& p, int64_t expert) {
  __shared__ float sums_of_warps[kWarps][kLogitsAtOnce];
  constexpr int kWidth = 8;
  const auto* x = static_cast<const BFloat16*>(p.x);
  const float* weight = p.weight + expert * p.shape.hidden_size;
  const auto num_tokens = static_cast<int>(p.shape.num_tokens);
  for (int first = 0; first < num_tokens; first += kLogitsAtOnce) {
    float sums[kLogitsAtOnce] = {};
    for (int64_t i = threadIdx.x * kWidth; i < p.shape.hidden_size; i += kWarps * kLanes * kWidth) {
      const Floats<kWidth> w = load<kWidth>(weight + i);
#pragma unroll
      for (int t = 0; t < kLogitsAtOnce; ++t) {
        if (first + t >= num_tokens) break;
        const Floats<kWidth> values = load<kWidth>(x + (first + t) * p.shape.hidden_size + i);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sums[t] += values[j] * w[j];
      }
    }
#pragma unroll
    for (float& sum : sums) sum = warp_sum(sum);
    __syncthreads();
    if (threadIdx.x % kLanes == 0) {
#pragma unroll
      for (int t = 0; t < kLogitsAtOnce; ++t) sums_of_warps[threadIdx.x / kLanes][t] = sums[t];
    }
    __syncthreads();
    const auto t = static_cast<int>(threadIdx.x);
    if (t >= kLogitsAtOnce || first + t >= num_tokens) continue;
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += sums_of_warps[warp][t];
    p.logits_TE[(first + t) * p.shape.num_experts + expert] = sum;
  }
}

/// All that the router does of one block of tokens: a thread block to an expert's logits, the last
/// of which goes on.
template <int kPer, bool kPlain>
__global__ void __launch_bounds__(kWarpsOf<kPer>* kLanes)
    route_one_block(const RouterTokens p, const RouterLogits logits) {
  wait_for_earlier();
  let_next_begin();
  constexpr int kWarps = kWarpsOf<kPer>;
  static_assert(kWarps * kLanes >= kPer * kLanes, "a thread to an expert of write_totals");
  __shared__ __align__(16) BlockScratch<kPer> block;
  make_logits<kWarps>(logits, blockIdx.x);
  if (!is_last_block(p.totals_counter)) return;
  route_block<kPer, kPlain>(p, 0, block);
  __syncthreads();
  __shared__ float counts_E[TokenScores<kPer>::kRowValues];
  const auto e = static_cast<int>(threadIdx.x);
  const bool is_expert = e < p.rule.num_experts;
  write_totals<kWarps>(p.totals, is_expert ? static_cast<double>(p.share_sums[e]) : 0.0,
                       is_expert ? static_cast<float>(p.counts[e]) : 0.0F, e == 0 ? *p.z_sums : 0.0,
                       counts_E);
}

}  // namespace

void launch_route_one_block(const RouterTokens& tokens, const RouterLogits& logits,
                            cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(tokens.rule.num_experts);
  with_experts_per_lane(tokens.rule.num_experts, [&]<int kPer>() {
    if constexpr (kPer * kLanes <= kRouterOneBlockExperts) {
      const auto kernel =
          is_plain(tokens) ? route_one_block<kPer, true> : route_one_block<kPer, false>;
      launch_early(kernel, {blocks, kWarpsOf<kPer> * kLanes}, stream, tokens, logits);
    }
  });
}

}  // namespace tessera::cuda
