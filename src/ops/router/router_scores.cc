#include "ops/router/router_scores.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/simd.h"

namespace tessera {
inline namespace TESSERA_CPU_LEVEL {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

float ranked(float key) {
  return std::isnan(key) ? kLowest : key;
}

/// The best `limit` candidates so far, best first. Candidates come in rising order, so that the
/// lower of two equal ones stays ahead.
struct BestOf {
  const float* keys;
  int32_t* best;
  int64_t limit;
  int64_t size = 0;

  void offer(int32_t candidate) {
    int64_t at = size;
    while (at > 0 && keys[candidate] > keys[best[at - 1]]) --at;
    if (at == limit) return;
    size = std::min(size + 1, limit);
    for (int64_t i = size - 1; i > at; --i) best[i] = best[i - 1];
    best[at] = candidate;
  }
};

float group_key(const float* keys, int64_t size, GroupScore score) {
  float first = kLowest;
  float second = kLowest;
  for (int64_t i = 0; i < size; ++i) {
    second = std::max(second, std::min(first, keys[i]));
    first = std::max(first, keys[i]);
  }
  return ranked(score == GroupScore::kMax ? first : first + second);
}

/// Leaves the chosen groups in rising order at the start of `groups`.
void select_groups(const RouterSpec& spec, const float* keys, float* group_keys, int32_t* groups) {
  const int64_t group_size = spec.num_experts / spec.num_groups;
  BestOf best{group_keys, groups, spec.top_groups};
  for (int64_t group = 0; group < spec.num_groups; ++group) {
    group_keys[group] = group_key(keys + group * group_size, group_size, spec.group_score);
    best.offer(static_cast<int32_t>(group));
  }
  std::sort(groups, groups + spec.top_groups);
}

/// to[i] = exp(from[i] - shift).
void exp_minus(float* to, const float* from, float shift, int64_t n) {
  simd::for_each_vector(n, [=](int64_t i, auto lanes) {
    simd::store(to + i, simd::exp(simd::load(from + i, lanes) - shift), lanes);
  });
}

}  // namespace

float softmax(const float* logits, int64_t n, float* to) {
  float largest = kLowest;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, logits[i]);
  exp_minus(to, logits, largest, n);
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += to[i];
  const float scale = 1.0F / sum;
  for (int64_t i = 0; i < n; ++i) to[i] *= scale;
  return largest + std::log(sum);
}

void separate_scores(ScoreFunction score, const float* logits, int64_t n, float* to) {
  if (score == ScoreFunction::kSqrtSoftplus) {
    for (int64_t i = 0; i < n; ++i) to[i] = sqrt_softplus(logits[i]);
    return;
  }
  for (int64_t i = 0; i < n; ++i) to[i] = -logits[i];
  exp_minus(to, to, 0.0F, n);
  for (int64_t i = 0; i < n; ++i) to[i] = 1.0F / (1.0F + to[i]);
}

float scores_to_shares(float* scores, int64_t n) {
  float sum = kScoreSumEpsilon;
  for (int64_t i = 0; i < n; ++i) sum += scores[i];
  for (int64_t i = 0; i < n; ++i) scores[i] /= sum;
  return sum;
}

float balance_shares(ScoreFunction score, const float* logits, int64_t n, float* to) {
  if (score == ScoreFunction::kSoftmax) {
    softmax(logits, n, to);
    return 1.0F;
  }
  separate_scores(score, logits, n, to);
  return scores_to_shares(to, n);
}

void choose_probs(const RouterSpec& spec, const float* scores, const int32_t* expert_idx,
                  float* probs) {
  for (int64_t k = 0; k < spec.top_k; ++k) probs[k] = scores[expert_idx[k]];
  float scale = static_cast<float>(spec.scaling_factor);
  if (spec.order == ScoreOrder::kAfterTopK) {
    softmax(probs, spec.top_k, probs);
  } else if (spec.normalize_top_k) {
    float sum = kScoreSumEpsilon;
    for (int64_t k = 0; k < spec.top_k; ++k) sum += probs[k];
    // By division, so that a single expert's probability is the same for all tokens: a capacity
    // must not choose by rounding.
    for (int64_t k = 0; k < spec.top_k; ++k) probs[k] /= sum;
  }
  for (int64_t k = 0; k < spec.top_k; ++k) probs[k] *= scale;
}

void select_experts(const RouterSpec& spec, float* keys, float* group_keys, int32_t* groups,
                    int32_t* expert_idx) {
  for (int64_t e = 0; e < spec.num_experts; ++e) keys[e] = ranked(keys[e]);
  select_groups(spec, keys, group_keys, groups);
  const auto group_size = static_cast<int32_t>(spec.num_experts / spec.num_groups);
  BestOf best{keys, expert_idx, spec.top_k};
  for (int64_t i = 0; i < spec.top_groups; ++i) {
    const int32_t first = groups[i] * group_size;
    for (int32_t e = first; e < first + group_size; ++e) best.offer(e);
  }
}

}  // namespace TESSERA_CPU_LEVEL
}  // namespace tessera
