// The gradient of the router's logits: a warp to a token.
#include <type_traits>

#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/short_kernel.cuh"
#include "ops/router/router_kernels.h"
#include "ops/router/router_scores.cuh"
#include "ops/router/router_terms.cuh"

namespace tessera::cuda {
namespace {

constexpr int kWarps = 4;

__host__ __device__ constexpr int64_t token_blocks(int64_t num_tokens) {
  return (num_tokens + kWarps - 1) / kWarps;
}

/// What a lane of few experts needs later, read before anything is waited for: few tokens do not
/// hide how long each reading takes.
struct EarlyValues {
  int32_t chosen = 0;  ///< of k = lane, like grad_prob
  float grad_prob = 0;
  float grad_balance = 0;
  float grad_z = 0;
  float count = 0;  ///< of the lane's expert

  __device__ __forceinline__ EarlyValues(const RouterBackwardTokens& p, int64_t token, int lane) {
    const bool has_choice = lane < p.rule.top_k;
    const int64_t choice = token * p.rule.top_k + lane;
    if (has_choice) chosen = p.expert_idx_TK[choice];
    if (has_choice && p.grad_probs_TK != nullptr) grad_prob = p.grad_probs_TK[choice];
    if (p.grad_balance != nullptr) grad_balance = *p.grad_balance;
    if (p.grad_z != nullptr) grad_z = *p.grad_z;
    if (p.counts_E != nullptr && lane < p.rule.num_experts) count = p.counts_E[lane];
  }
};
struct NoEarlyValues {
  __device__ __forceinline__ NoEarlyValues(const RouterBackwardTokens& /*p*/, int64_t /*token*/,
                                           int /*lane*/) {}
};

/// kFew: see is_router_few.
template <int kPer, bool kFew>
struct TokenBackward {
  static_assert(!kFew || kPer == 1);

  const RouterBackwardTokens& p;
  TokenScores<kPer> scores;
  int64_t token;
  float* scratch_E;  ///< shared memory of the warp
  std::conditional_t<kFew, EarlyValues, NoEarlyValues> early{p, token, scores.lane};

  __device__ __forceinline__ bool is_softmax() const {
    return p.rule.score == ScoreFunction::kSoftmax;
  }

  /// For the lane's k alone.
  __device__ __forceinline__ int32_t chosen(int k) const {
    if constexpr (kFew) return early.chosen;
    return p.expert_idx_TK[token * p.rule.top_k + k];
  }
  __device__ __forceinline__ float grad_prob(int k) const {
    if constexpr (kFew) return early.grad_prob;
    return p.grad_probs_TK[token * p.rule.top_k + k];
  }
  __device__ __forceinline__ float grad_balance() const {
    if constexpr (kFew) return early.grad_balance;
    return *p.grad_balance;
  }
  __device__ __forceinline__ float grad_z() const {
    if constexpr (kFew) return early.grad_z;
    return *p.grad_z;
  }
  /// What the lanes put into scratch_E of the chosen experts, and 0 for the others.
  template <typename ValueOf>
  __device__ __forceinline__ void scatter(ValueOf value_of, float (&to)[kPer]) const {
    constexpr float kZeros[kPer] = {};
    __syncwarp();
    scores.store_row(kZeros, scratch_E);
    __syncwarp();
    for (int k = scores.lane; k < p.rule.top_k; k += kLanes) scratch_E[chosen(k)] = value_of(k);
    __syncwarp();
    scores.load_row(scratch_E, to);
  }

  /// The gradient of the probabilities as one of the scores that they were picked from.
  __device__ __forceinline__ void chosen_scores(const float (&of)[kPer], float (&ds)[kPer]) const {
    const int top_k = p.rule.top_k;
    float scale = p.rule.scale;
    float mean = 0;  // of the gradient, weighted by the normalised scores
    if (p.rule.normalize) {
      scores.store_row(of, scratch_E);
      __syncwarp();
      float sum = 0;
      for (int k = scores.lane; k < top_k; k += kLanes) sum += scratch_E[chosen(k)];
      sum = kShareSumEpsilon + warp_sum(sum);
      for (int k = scores.lane; k < top_k; k += kLanes)
        mean += scratch_E[chosen(k)] / sum * grad_prob(k);
      mean = warp_sum(mean);
      scale /= sum;
    }
    scatter([&](int k) { return scale * (grad_prob(k) - mean); }, ds);
  }

  /// Softmax over the chosen logits alone: straight to the gradient of the logits.
  __device__ __forceinline__ void add_chosen_logits(float (&dl)[kPer]) const {
    const int top_k = p.rule.top_k;
    const float* logits = p.logits_TE + token * p.rule.num_experts;
    float largest = -INFINITY;
    for (int k = scores.lane; k < top_k; k += kLanes) largest = fmaxf(largest, logits[chosen(k)]);
    largest = warp_max(largest);
    float sum = 0;
    float dot = 0;
    for (int k = scores.lane; k < top_k; k += kLanes) {
      const float term = expf(logits[chosen(k)] - largest);
      sum += term;
      dot += term * grad_prob(k);
    }
    sum = warp_sum(sum);
    dot = warp_sum(dot) / sum;
    float added[kPer];
    scatter(
        [&](int k) {
          return p.rule.scale * (expf(logits[chosen(k)] - largest) / sum) * (grad_prob(k) - dot);
        },
        added);
#pragma unroll
    for (int i = 0; i < kPer; ++i) dl[i] += added[i];
  }

  /// Adds the gradient of scale/T · Σ_e w_e·q_e, q being the token's shares.
  __device__ __forceinline__ void add_shares(const float (&weights)[kPer], float scale,
                                             const float (&of)[kPer], float (&ds)[kPer]) const {
    scale /= static_cast<float>(p.num_tokens);
    float mean = 0;
    float sum = 1;
    if (!is_softmax()) {
      float shares[kPer];
      sum = scores.normalize(of, shares);
      mean = scores.dot(shares, weights);
    }
#pragma unroll
    for (int i = 0; i < kPer; ++i) ds[i] += scale * (weights[i] - mean) / sum;
  }

  /// The fractions of the token's segment.
  __device__ __forceinline__ void load_fractions(float (&to)[kPer]) const {
    const int num_experts = p.rule.num_experts;
    if constexpr (kFew) {
      if (p.counts_E != nullptr) {  // the sum's order is make_fractions'
        const auto sum = static_cast<float>(warp_sum(static_cast<double>(early.count)));
        to[0] = scores.has(0) ? group_fraction(p.counts_E, scores.lane, p.group_size, sum) : 0.0F;
        return;
      }
    }
    const int64_t segment =
        p.cu_seqlens == nullptr ? 0 : segment_of(p.cu_seqlens, p.num_segments, token);
    scores.load(p.fractions_SE + segment * num_experts, to);
  }

  /// The scores' own gradient, ds, as one of the logits.
  __device__ __forceinline__ void add_scores(const float (&of)[kPer], const float (&ds)[kPer],
                                             float (&dl)[kPer]) const {
    if (is_softmax()) {
      const float dot = scores.dot(of, ds);
#pragma unroll
      for (int i = 0; i < kPer; ++i) dl[i] += of[i] * (ds[i] - dot);
    } else {
#pragma unroll
      for (int i = 0; i < kPer; ++i) dl[i] += of[i] * (relative_slope(p.rule.score, of[i]) * ds[i]);
    }
  }

  __device__ __forceinline__ void write_terms(const float (&dl)[kPer], __nv_bfloat16* to_4E) const {
    const int num_experts = p.rule.num_experts;
    constexpr int kStep = kPer % 4 == 0 ? 4 : 1;  // the number of experts is a multiple of 8
#pragma unroll
    for (int i = 0; i < kPer; i += kStep) {
      if (!scores.has(i)) continue;
      RouterTermValues terms[kStep];
#pragma unroll
      for (int j = 0; j < kStep; ++j) terms[j] = split_into_terms(dl[i + j]);
      __nv_bfloat16* to = to_4E + scores.expert(i);
      write_term(terms, 0, to);
#pragma unroll
      for (int term = 0; term < 3; ++term) write_term(terms, term, to + (term + 1) * num_experts);
    }
  }
  template <int kStep>
  static __device__ __forceinline__ void write_term(const RouterTermValues (&terms)[kStep],
                                                    int term, __nv_bfloat16* to) {
    if constexpr (kStep == 4) {
      const __nv_bfloat162 low(terms[0].of[term], terms[1].of[term]);
      const __nv_bfloat162 high(terms[2].of[term], terms[3].of[term]);
      *reinterpret_cast<uint2*>(to) =
          uint2{reinterpret_cast<const uint32_t&>(low), reinterpret_cast<const uint32_t&>(high)};
    } else {
      *to = terms[0].of[term];
    }
  }

  __device__ __forceinline__ void run() const {
    const int num_experts = p.rule.num_experts;
    float logits[kPer], soft[kPer], of[kPer], ds[kPer] = {}, dl[kPer] = {};
    scores.load_logits(p.logits_TE + token * num_experts, logits);
    const SoftmaxScale softmax = scores.softmax(logits, soft);
    if (is_softmax()) {
#pragma unroll
      for (int i = 0; i < kPer; ++i) of[i] = soft[i];
    } else {
      scores.separate(p.rule.score, logits, of);
    }
    if (p.given_grad_logits_TE != nullptr)
      scores.load(p.given_grad_logits_TE + token * num_experts, dl);
    if (p.grad_probs_TK != nullptr && !p.rule.after_top_k) chosen_scores(of, ds);
    if (p.grad_balance != nullptr) {
      const float scale = grad_balance() * static_cast<float>(num_experts / p.group_size);
      float fractions[kPer];
      load_fractions(fractions);
      add_shares(fractions, scale, of, ds);
    }
    if (p.grad_means_E != nullptr) {
      float grad_means[kPer];
      scores.load(p.grad_means_E, grad_means);
      add_shares(grad_means, 1.0F, of, ds);
    }
    add_scores(of, ds, dl);
    if (p.grad_probs_TK != nullptr && p.rule.after_top_k) add_chosen_logits(dl);
    if (p.grad_z != nullptr) {
      const float scale =
          grad_z() * 2.0F * softmax.log_sum_exp() / static_cast<float>(p.num_tokens);
#pragma unroll
      for (int i = 0; i < kPer; ++i) dl[i] += scale * soft[i];
    }
    if (p.grad_logits_TE != nullptr) scores.store(dl, p.grad_logits_TE + token * num_experts);
    if (p.grad_terms_T4E != nullptr)
      write_terms(dl, static_cast<__nv_bfloat16*>(p.grad_terms_T4E) + token * 4 * num_experts);
  }
};

/// Where tokens are few, blocks behind those of the tokens make the weight's terms.
template <int kPer, bool kFew>
__global__ void __launch_bounds__(kWarps* kLanes) backward_tokens(const RouterBackwardTokens p) {
  wait_for_earlier();
  let_next_begin_if_short();
  __shared__ __align__(16) float scratch_E[kWarps][TokenScores<kPer>::kRowValues];
  const int warp = threadIdx.x / kLanes;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  if constexpr (kFew) {
    const int64_t own = static_cast<int64_t>(blockIdx.x) - token_blocks(p.num_tokens);
    if (own >= 0) {
      write_weight_terms(p.weight, own * (kWarps * kLanes) + threadIdx.x);
      return;
    }
  }
  if (token >= p.num_tokens) return;
  const TokenScores<kPer> scores{p.rule.num_experts, static_cast<int>(threadIdx.x) % kLanes};
  TokenBackward<kPer, kFew>{p, scores, token, scratch_E[warp]}.run();
}

}  // namespace

void launch_router_backward_tokens(const RouterBackwardTokens& tokens, cudaStream_t stream) {
  if (tokens.num_tokens == 0) return;
  const int num_experts = tokens.rule.num_experts;
  const int64_t blocks = token_blocks(tokens.num_tokens);
  constexpr int kThreads = kWarps * kLanes;
  if (is_router_few(tokens.num_tokens, num_experts)) {
    const int64_t weight_blocks = (tokens.weight.count + kThreads - 1) / kThreads;
    launch_early(backward_tokens<1, true>,
                 {static_cast<unsigned>(blocks + weight_blocks), kThreads}, stream, tokens);
    return;
  }
  with_experts_per_lane(num_experts, [&]<int kPer>() {
    launch_early(backward_tokens<kPer, false>, {static_cast<unsigned>(blocks), kThreads}, stream,
                 tokens);
  });
}

}  // namespace tessera::cuda
