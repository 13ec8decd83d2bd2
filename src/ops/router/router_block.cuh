#pragma once

#include "ops/router/router_kernels.h"
#include "ops/router/router_scores.cuh"

/// Scores, choice and probabilities of a block of tokens: a warp to a token.
namespace tessera::cuda {

/// Warps of a block, for whose scores its shared memory has room.
template <int kPer>
constexpr int kWarpsOf = kPer <= 16 ? 8 : 4;
template <int kPer>
constexpr int kTokensPerWarp = kRouterBlockTokens / kWarpsOf<kPer>;
constexpr int kGroupWords = kRouterMaxExperts / 32;

/// NaN ranks with minus infinity.
__device__ __forceinline__ float not_nan(float key) {
  return fmaxf(key, -INFINITY);
}

/// Keys, none of them NaN, as integers of the same order; 0 is below every key.
__device__ __forceinline__ uint32_t ordered(float key) {
  const uint32_t bits = __float_as_uint(key + 0.0F);  // -0 is as 0
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000U);
}

/// The index of the warp's largest key, the lowest among equals, which is taken out. The lane's
/// indices rise with i.
template <int kPer, typename IndexOf>
__device__ __forceinline__ int take_best(uint32_t (&keys)[kPer], IndexOf index_of) {
  constexpr int kNone = 0x7FFFFFFF;
  uint32_t best = 0;
  int at = kNone;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if (keys[i] > best) {
      best = keys[i];
      at = index_of(i);
    }
  }
  const uint32_t top = __reduce_max_sync(kAllLanes, best);
  const int winner = __reduce_min_sync(kAllLanes, best == top ? at : kNone);
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if (index_of(i) == winner) keys[i] = 0;
  }
  return winner;
}

/// A lane's keys, best first, of equal ones the lower expert first; 0 is none.
template <int kPer>
struct SortedKeys {
  static_assert(kPer <= 8);
  uint32_t keys[kPer];
  uint32_t places = 0;  ///< four bits each: which of the lane's experts has the key

  /// Sorts by neighbours, which keeps equal ones in order.
  __device__ __forceinline__ explicit SortedKeys(const uint32_t (&unsorted)[kPer]) {
    uint32_t place[kPer];
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      keys[i] = unsorted[i];
      place[i] = i;
    }
#pragma unroll
    for (int round = 0; round < kPer; ++round) {
#pragma unroll
      for (int i = round % 2; i + 1 < kPer; i += 2) {
        const bool swap = keys[i + 1] > keys[i];
        const uint32_t higher = max(keys[i], keys[i + 1]);
        keys[i + 1] = min(keys[i], keys[i + 1]);
        keys[i] = higher;
        const uint32_t first = swap ? place[i + 1] : place[i];
        place[i + 1] = swap ? place[i] : place[i + 1];
        place[i] = first;
      }
    }
#pragma unroll
    for (int i = 0; i < kPer; ++i) places |= place[i] << 4 * i;
  }

  __device__ __forceinline__ int best() const {
    return static_cast<int>(places & 15);
  }
  __device__ __forceinline__ void take_out_best_if(bool taken) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const uint32_t after = i + 1 < kPer ? keys[i + 1] : 0;
      keys[i] = taken ? after : keys[i];
    }
    places = taken ? places >> 4 : places;
  }
};

/// Choices that several tokens of a warp may have to be written together.
constexpr int kFewChoices = 8;
/// Tokens whose choices a warp writes together, a lane each; 1 where shared memory lacks the room.
template <int kPer>
constexpr int kTokensTogether = kPer <= 8 ? kTokensPerWarp<kPer> : 1;
static_assert(kTokensTogether<1> * kFewChoices == kLanes);

/// A warp's shared memory.
template <int kPer>
struct WarpScratch {
  static constexpr int kRowValues = TokenScores<kPer>::kRowValues;
  /// What experts are compared by, without the bias, of each of the tokens.
  float compared_E[kTokensTogether<kPer>][kRowValues];
  union {
    float keys_E[kRowValues];  ///< with it
    /// Of one token, and behind it the few of each where they are written together.
    int32_t chosen[kRowValues + kTokensTogether<kPer> * kFewChoices];
  };
  uint32_t groups[kGroupWords];  ///< a bit for each chosen group

  __device__ __forceinline__ const int32_t* few_chosen(int token) const {
    return chosen + kRowValues + token * kFewChoices;
  }
};

/// kPlain: neither scores of one logit each nor groups, a bias or forced balance.
template <int kPer, bool kPlain>
struct TokenRouter {
  const RouterRule& rule;
  TokenScores<kPer> scores;
  WarpScratch<kPer>& scratch;
  float* compared_E;  ///< the token's
  int32_t* chosen;    ///< its result

  /// Calls visit(k) for each of the lane's k of the choices.
  template <typename Visit>
  __device__ __forceinline__ void for_each_choice(Visit visit) const {
#pragma unroll 1
    for (int first = 0; first < rule.top_k; first += kLanes) {
      const int k = first + scores.lane;
      if (k < rule.top_k) visit(k);
    }
  }

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
      group_keys[i] = group < rule.num_groups ? ordered(not_nan(group_key(group))) : 0;
    }
    scratch.groups[lane] = 0;
    for (int i = 0; i < rule.top_groups; ++i) {
      const int group = take_best(group_keys, [&](int j) { return j * kLanes + lane; });
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

  /// A key for each of the lane's experts, 0 for those that cannot be chosen.
  __device__ __forceinline__ void make_keys(const float (&compared)[kPer], const float* bias_E,
                                            uint32_t (&keys)[kPer]) const {
    float biased[kPer];
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      biased[i] = compared[i];
      if (!kPlain && bias_E != nullptr && scores.has(i)) biased[i] += bias_E[scores.expert(i)];
      biased[i] = not_nan(biased[i]);
      keys[i] = scores.has(i) ? ordered(biased[i]) : 0;
    }
    if (kPlain || rule.top_groups == rule.num_groups) return;
    scores.store_row(biased, scratch.keys_E);
    limit_to_groups(keys);
    __syncwarp();
  }

  /// Of many keys of a lane, the best are found by looking at all each time.
  __device__ __forceinline__ void choose_by_search(uint32_t (&keys)[kPer]) const {
    for (int k = 0; k < rule.top_k; ++k) {
      const int expert = take_best(keys, [&](int i) { return scores.expert(i); });
      if (scores.lane == 0) chosen[k] = expert;
    }
  }

  __device__ __forceinline__ void choose_sorted(const uint32_t (&keys)[kPer]) const {
    SortedKeys<kPer> sorted(keys);
    const unsigned lower_lanes = (1U << scores.lane) - 1;
    for (int k = 0; k < rule.top_k; ++k) {
      const uint32_t top = __reduce_max_sync(kAllLanes, sorted.keys[0]);
      // Of lanes with equal keys, the first has the lower experts.
      const bool best = sorted.keys[0] == top;
      const bool taken = (__ballot_sync(kAllLanes, best) & lower_lanes) == 0 && best;
      if (taken) chosen[k] = scores.expert(sorted.best());
      sorted.take_out_best_if(taken);
    }
  }

  __device__ __forceinline__ void choose(const float (&compared)[kPer], const float* bias_E) const {
    uint32_t keys[kPer];
    make_keys(compared, bias_E, keys);
    if constexpr (kPer <= 8) {
      choose_sorted(keys);
    } else {
      choose_by_search(keys);
    }
  }

  __device__ __forceinline__ void choose_balanced(int64_t token) const {
    for_each_choice([&](int k) {
      chosen[k] = static_cast<int32_t>((token * rule.top_k + k) % rule.num_experts);
    });
  }

  __device__ __forceinline__ void choose_replayed(const int32_t* replayed_K) const {
    for_each_choice([&](int k) { chosen[k] = replayed_K[k]; });
  }

  __device__ __forceinline__ float chosen_value(int k) const {
    return compared_E[chosen[k]];
  }

  /// What the chosen values, or where their softmax is taken its terms, are divided by. By
  /// division, so that a single expert's probability is the same for all tokens: a capacity must
  /// not choose by rounding.
  __device__ __forceinline__ SoftmaxScale find_scale() const {
    SoftmaxScale scale = {0, 1};
    if (rule.after_top_k) {
      scale = {-INFINITY, 0};
      for_each_choice([&](int k) { scale.largest = fmaxf(scale.largest, chosen_value(k)); });
      scale.largest = warp_max(scale.largest);
      for_each_choice([&](int k) { scale.sum += expf(chosen_value(k) - scale.largest); });
      scale.sum = warp_sum(scale.sum);
    } else if (rule.normalize) {
      scale.sum = 0;
      for_each_choice([&](int k) { scale.sum += chosen_value(k); });
      scale.sum = kShareSumEpsilon + warp_sum(scale.sum);
    }
    return scale;
  }

  __device__ __forceinline__ void write_choices(float* probs_K, int32_t* expert_idx_K,
                                                int32_t* counts_E) const {
    const SoftmaxScale scale = find_scale();
    for_each_choice([&](int k) {
      const int32_t expert = chosen[k];
      const float value = compared_E[expert];
      probs_K[k] =
          (rule.after_top_k ? expf(value - scale.largest) : value) / scale.sum * rule.scale;
      expert_idx_K[k] = expert;
      atomicAdd(&counts_E[expert], 1);
    });
  }
};

/// A thread block's shared memory.
template <int kPer>
struct BlockScratch {
  WarpScratch<kPer> warps[kWarpsOf<kPer>];
  double z_sums[kWarpsOf<kPer>];
  int32_t counts_E[TokenScores<kPer>::kRowValues];
};

/// Chooses a token's experts; returns the scale of its softmax.
template <int kPer, bool kPlain>
__device__ __forceinline__ SoftmaxScale route_token(const RouterTokens& p,
                                                    const TokenRouter<kPer, kPlain>& router,
                                                    int64_t token, const float (&logits)[kPer],
                                                    float (&share_sums)[kPer]) {
  const TokenScores<kPer>& scores = router.scores;
  float shares[kPer], compared[kPer];
  const SoftmaxScale scale = scores.softmax(logits, shares);
  if (!kPlain && p.rule.score != ScoreFunction::kSoftmax) {
    scores.separate(p.rule.score, logits, compared);
    scores.normalize(compared, shares);
  } else {
#pragma unroll
    for (int i = 0; i < kPer; ++i) compared[i] = p.rule.after_top_k ? logits[i] : shares[i];
  }
#pragma unroll
  for (int i = 0; i < kPer; ++i) share_sums[i] += shares[i];
  scores.store_row(compared, router.compared_E);
  if (!kPlain && p.rule.force_balanced) {
    router.choose_balanced(token);
  } else if (!kPlain && p.replayed_TK != nullptr && p.replayed_TK[token * p.rule.top_k] >= 0) {
    router.choose_replayed(p.replayed_TK + token * p.rule.top_k);
  } else {
    router.choose(compared, p.bias_E);
  }
  return scale;
}

/// Writes the few choices of `count` tokens from `first` on, a lane each.
template <int kPer>
__device__ __forceinline__ void write_together(const RouterTokens& p,
                                               const WarpScratch<kPer>& scratch, int64_t first,
                                               int64_t count, int32_t* counts_E) {
  const RouterRule& rule = p.rule;
  const int token = threadIdx.x % kLanes / kFewChoices;
  const int k = threadIdx.x % kFewChoices;
  const bool is_choice = token < count && k < rule.top_k;
  const int32_t expert = is_choice ? scratch.few_chosen(token)[k] : 0;
  float value = scratch.compared_E[token][expert];
  float sum = 1;
  if (rule.after_top_k) {
    value = expf(value - lanes_max<kFewChoices>(is_choice ? value : -INFINITY));
    sum = lanes_sum<kFewChoices>(is_choice ? value : 0.0F);
  } else if (rule.normalize) {
    sum = kShareSumEpsilon + lanes_sum<kFewChoices>(is_choice ? value : 0.0F);
  }
  if (!is_choice) return;
  const int64_t at = (first + token) * rule.top_k + k;
  p.probs_TK[at] = value / sum * rule.scale;  // by division, as in write_choices
  p.expert_idx_TK[at] = expert;
  atomicAdd(&counts_E[expert], 1);
}

/// Writes the sums over the block's warps, each of which has left its own in compared_E.
template <int kPer>
__device__ __forceinline__ void write_sums(const RouterTokens& p, int64_t number,
                                           const BlockScratch<kPer>& block) {
  const int num_experts = p.rule.num_experts;
  const int64_t row = number * num_experts;
  for (int e = threadIdx.x; e < num_experts; e += blockDim.x) {
    float sum = 0;
    for (const WarpScratch<kPer>& warp : block.warps) sum += warp.compared_E[0][e];
    p.share_sums[row + e] = sum;
    p.counts[row + e] = block.counts_E[e];
  }
  if (threadIdx.x != 0) return;
  double sum = 0;
  for (const double z_sum : block.z_sums) sum += z_sum;
  p.z_sums[number] = sum;
}

/// By a thread block: the tokens and statistics of the block of tokens that has this number.
template <int kPer, bool kPlain>
__device__ __forceinline__ void route_block(const RouterTokens& p, int64_t number,
                                            BlockScratch<kPer>& block) {
  const int warp = threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  for (int e = threadIdx.x; e < p.rule.num_experts; e += blockDim.x) block.counts_E[e] = 0;
  __syncthreads();

  WarpScratch<kPer>& scratch = block.warps[warp];
  const TokenScores<kPer> scores{p.rule.num_experts, lane};
  const bool together = kTokensTogether<kPer> > 1 && p.rule.top_k <= kFewChoices;
  const int64_t first = number * kRouterBlockTokens + warp * kTokensPerWarp<kPer>;
  const auto count =
      static_cast<int>(max(min(p.num_tokens - first, int64_t{kTokensPerWarp<kPer>}), int64_t{0}));
  const float* from = p.logits_TE + first * p.rule.num_experts;
  float share_sums[kPer] = {};
  SoftmaxScale lane_scale = {0, 1};  // of the token that has this lane's number
  float logits[kPer] = {};
  if (count > 0) scores.load_logits(from, logits);
#pragma unroll 1
  for (int t = 0; t < count; ++t) {
    float next[kPer] = {};  // read ahead
    from += p.rule.num_experts;
    if (t + 1 < count) scores.load_logits(from, next);
    const int first_choice = together ? WarpScratch<kPer>::kRowValues + t * kFewChoices : 0;
    const TokenRouter<kPer, kPlain> router{p.rule, scores, scratch,
                                           scratch.compared_E[together ? t : 0],
                                           scratch.chosen + first_choice};
    const SoftmaxScale scale = route_token(p, router, first + t, logits, share_sums);
    if (t == lane) lane_scale = scale;
    if (!together) {
      __syncwarp();
      const int64_t at = (first + t) * p.rule.top_k;
      router.write_choices(p.probs_TK + at, p.expert_idx_TK + at, block.counts_E);
      __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < kPer; ++i) logits[i] = next[i];
  }
  if (together) {
    __syncwarp();
    write_together(p, scratch, first, count, block.counts_E);
    __syncwarp();
  }

  scores.store_row(share_sums, scratch.compared_E[0]);
  const auto lse = static_cast<double>(lane_scale.log_sum_exp());
  const double z_sum = warp_sum(lse * lse);
  if (lane == 0) block.z_sums[warp] = z_sum;
  __syncthreads();
  write_sums(p, number, block);
}

/// Whether scores are a softmax's and experts chosen by them alone (TokenRouter's kPlain).
inline bool is_plain(const RouterTokens& tokens) {
  const RouterRule& rule = tokens.rule;
  return rule.score == ScoreFunction::kSoftmax && !rule.force_balanced &&
         tokens.bias_E == nullptr && tokens.replayed_TK == nullptr &&
         rule.top_groups == rule.num_groups;
}

}  // namespace tessera::cuda
