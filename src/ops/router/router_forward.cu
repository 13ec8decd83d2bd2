// Scores, choice and probabilities: a warp to a token, and each block's statistics.
#include "ops/router/router_kernels.h"
#include "ops/router/router_scores.cuh"

namespace tessera::cuda {
namespace {

/// Warps of a block, for whose scores its shared memory has room.
template <int kPer>
constexpr int kWarpsOf = kPer <= 16 ? 8 : 4;
constexpr int kGroupWords = kRouterMaxExperts / 32;

/// Keys as integers of the same order. NaN ranks with minus infinity, and 0 is below every key.
__device__ __forceinline__ uint32_t ordered(float key) {
  if (isnan(key)) key = -INFINITY;
  const uint32_t bits = key == 0.0F ? 0U : __float_as_uint(key);
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}

/// The warp's largest key, the lowest index among equals, which is taken out.
template <int kPer>
__device__ __forceinline__ int take_best(uint32_t (&keys)[kPer], int lane) {
  constexpr int kNone = 0x7FFFFFFF;
  uint32_t best = 0;
  int at = kNone;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if (keys[i] > best) {
      best = keys[i];
      at = i * kLanes + lane;
    }
  }
  const uint32_t top = __reduce_max_sync(kAllLanes, best);
  const int winner = __reduce_min_sync(kAllLanes, best == top ? at : kNone);
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if (i * kLanes + lane == winner) keys[i] = 0;
  }
  return winner;
}

/// A warp's shared memory.
struct WarpScratch {
  float* compared_E;  ///< what experts are compared by, without the bias
  float* keys_E;      ///< with it; once groups are chosen, the chosen experts
  uint32_t* groups;   ///< a bit for each chosen group

  static __host__ __device__ size_t num_words(int num_experts) {
    return 2 * static_cast<size_t>(num_experts) + kGroupWords;
  }
  static __device__ WarpScratch of_warp(float* shared, int warp, int num_experts) {
    float* first = shared + warp * num_words(num_experts);
    return {first, first + num_experts, reinterpret_cast<uint32_t*>(first + 2 * num_experts)};
  }
  __device__ int32_t* chosen() const { return reinterpret_cast<int32_t*>(keys_E); }
};

template <int kPer>
struct TokenRouter {
  const RouterRule& rule;
  TokenScores<kPer> scores;
  WarpScratch scratch;

  __device__ __forceinline__ float group_key(int group) const {
    const int size = rule.num_experts / rule.num_groups;
    float first = -INFINITY;
    float second = -INFINITY;
    for (int i = 0; i < size; ++i) {
      // Lanes start at different places, since groups of 32 would meet in one bank.
      const float key = scratch.keys_E[group * size + (i + scores.lane) % size];
      second = fmaxf(second, fminf(first, key));
      first = fmaxf(first, key);
    }
    return rule.top_two_groups ? first + second : first;
  }

  /// Takes out the keys of experts whose group is not among the best.
  __device__ __forceinline__ void limit_to_groups(uint32_t (&keys)[kPer]) const {
    const int lane = scores.lane;
    uint32_t group_keys[kPer];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int group = i * kLanes + lane;
      group_keys[i] = group < rule.num_groups ? ordered(group_key(group)) : 0;
    }
    scratch.groups[lane] = 0;
    for (int i = 0; i < rule.top_groups; ++i) {
      const int group = take_best(group_keys, lane);
      if (lane == group / 32) scratch.groups[lane] |= 1U << group % 32;
    }
    __syncwarp();
    const int size = rule.num_experts / rule.num_groups;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (!scores.has(i)) continue;
      const int group = scores.expert(i) / size;
      if ((scratch.groups[group / 32] >> group % 32 & 1U) == 0) keys[i] = 0;
    }
  }

  __device__ __forceinline__ void choose(const float (&compared)[kPer], const float* bias_E) const {
    uint32_t keys[kPer];
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      keys[i] = 0;
      if (!scores.has(i)) continue;
      float key = compared[i] + (bias_E == nullptr ? 0.0F : bias_E[scores.expert(i)]);
      if (isnan(key)) key = -INFINITY;
      scratch.keys_E[scores.expert(i)] = key;
      keys[i] = ordered(key);
    }
    if (rule.top_groups < rule.num_groups) limit_to_groups(keys);
    __syncwarp();
    for (int k = 0; k < rule.top_k; ++k) {
      const int expert = take_best(keys, scores.lane);
      if (scores.lane == 0) scratch.chosen()[k] = expert;
    }
  }

  __device__ __forceinline__ float chosen_value(int k) const {
    return scratch.compared_E[scratch.chosen()[k]];
  }

  __device__ __forceinline__ void write_probs(float* probs_K) const {
    const int lane = scores.lane;
    float largest = 0;
    float sum = 1;
    if (rule.after_top_k) {
      largest = -INFINITY;
      for (int k = lane; k < rule.top_k; k += kLanes) largest = fmaxf(largest, chosen_value(k));
      largest = warp_max(largest);
      sum = 0;
      for (int k = lane; k < rule.top_k; k += kLanes) sum += expf(chosen_value(k) - largest);
      sum = warp_sum(sum);
    } else if (rule.normalize) {
      sum = 0;
      for (int k = lane; k < rule.top_k; k += kLanes) sum += chosen_value(k);
      sum = kShareSumEpsilon + warp_sum(sum);
    }
    for (int k = lane; k < rule.top_k; k += kLanes) {
      const float value = chosen_value(k);
      // By division, so that a single expert's probability is the same for all tokens: a capacity
      // must not choose by rounding.
      probs_K[k] = (rule.after_top_k ? expf(value - largest) : value) / sum * rule.scale;
    }
  }
};

/// A token's logits; where they come in three parts, the smallest is added first.
template <int kPer>
__device__ __forceinline__ void find_logits(const RouterTokens& p, const TokenScores<kPer>& scores,
                                            int64_t token, float (&logits)[kPer]) {
  const int num_experts = p.rule.num_experts;
  float* own = p.logits_TE + token * num_experts;
  if (p.products_T3E == nullptr) return scores.load(own, logits);
  const float* parts = p.products_T3E + token * 3 * num_experts;
  float second[kPer], third[kPer];
  scores.load(parts, logits);
  scores.load(parts + num_experts, second);
  scores.load(parts + 2 * num_experts, third);
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    logits[i] = third[i] + second[i] + logits[i];
    if (scores.has(i)) own[scores.expert(i)] = logits[i];
  }
}

template <int kPer>
__global__ void __launch_bounds__(kWarpsOf<kPer>* kLanes) route_tokens(const RouterTokens p) {
  constexpr int kWarps = kWarpsOf<kPer>;
  constexpr int kTokensPerWarp = kRouterBlockTokens / kWarps;
  extern __shared__ float shared[];
  __shared__ double z_sums[kWarps];
  const int num_experts = p.rule.num_experts;
  const int warp = threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  int32_t* counts =
      reinterpret_cast<int32_t*>(shared + kWarps * WarpScratch::num_words(num_experts));
  for (int e = threadIdx.x; e < num_experts; e += blockDim.x) counts[e] = 0;
  __syncthreads();

  const TokenRouter<kPer> router{
      p.rule, {num_experts, lane}, WarpScratch::of_warp(shared, warp, num_experts)};
  const TokenScores<kPer>& scores = router.scores;
  float share_sums[kPer] = {};
  double z_sum = 0;
  const int64_t first =
      static_cast<int64_t>(blockIdx.x) * kRouterBlockTokens + warp * kTokensPerWarp;
  const int64_t last = min(first + kTokensPerWarp, p.num_tokens);
  for (int64_t token = first; token < last; ++token) {
    float logits[kPer], shares[kPer], compared[kPer];
    find_logits(p, scores, token, logits);
    const float lse = scores.softmax(logits, shares);
    z_sum += static_cast<double>(lse) * static_cast<double>(lse);
    if (p.rule.sigmoid) {
      scores.sigmoid(logits, compared);
      scores.normalize(compared, shares);
    } else {
#pragma unroll
      for (int i = 0; i < kPer; ++i) compared[i] = p.rule.after_top_k ? logits[i] : shares[i];
    }
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      share_sums[i] += shares[i];
      if (scores.has(i)) router.scratch.compared_E[scores.expert(i)] = compared[i];
    }
    if (p.rule.force_balanced) {
      for (int k = lane; k < p.rule.top_k; k += kLanes)
        router.scratch.chosen()[k] = static_cast<int32_t>((token * p.rule.top_k + k) % num_experts);
    } else {
      router.choose(compared, p.bias_E);
    }
    __syncwarp();
    router.write_probs(p.probs_TK + token * p.rule.top_k);
    for (int k = lane; k < p.rule.top_k; k += kLanes) {
      const int32_t expert = router.scratch.chosen()[k];
      p.expert_idx_TK[token * p.rule.top_k + k] = expert;
      atomicAdd(&counts[expert], 1);
    }
    __syncwarp();
  }

#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if (scores.has(i)) router.scratch.compared_E[scores.expert(i)] = share_sums[i];
  }
  if (lane == 0) z_sums[warp] = z_sum;
  __syncthreads();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * num_experts;
  for (int e = threadIdx.x; e < num_experts; e += blockDim.x) {
    float sum = 0;
    for (int w = 0; w < kWarps; ++w)
      sum += WarpScratch::of_warp(shared, w, num_experts).compared_E[e];
    p.share_sums[row + e] = sum;
    p.counts[row + e] = counts[e];
  }
  if (threadIdx.x == 0) {
    double sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += z_sums[w];
    p.z_sums[blockIdx.x] = sum;
  }
}

}  // namespace

void launch_route_tokens(const RouterTokens& tokens, cudaStream_t stream) {
  if (tokens.num_tokens == 0) return;
  const int num_experts = tokens.rule.num_experts;
  const auto blocks = static_cast<unsigned>(router_blocks(tokens.num_tokens));
  with_experts_per_lane(num_experts, [&]<int kPer>() {
    constexpr int kWarps = kWarpsOf<kPer>;
    const size_t num_bytes =
        (kWarps * WarpScratch::num_words(num_experts) + static_cast<size_t>(num_experts)) * 4;
    route_tokens<kPer><<<blocks, kWarps * kLanes, num_bytes, stream>>>(tokens);
  });
}

}  // namespace tessera::cuda
