#pragma once

#include <cmath>
#include <cstdint>

#include "core/host_device.h"
#include "core/philox.h"

/// One token's part of SparseMixer, the same on CPUs and GPUs.
namespace tessera {

/// What the random numbers of a token are made of.
struct SparseMixerNoise {
  uint32_t key_low;
  uint32_t key_high;
  int64_t token;

  /// Uniform in (0, 1), of an expert and a choice. The counter's last word, which Jitter leaves 0,
  /// tells streams apart.
  TESSERA_HOST_DEVICE_INLINE double uniform(int index, int stream) const {
    const auto number = static_cast<uint64_t>(token);
    const PhiloxWords words =
        philox_words({{static_cast<uint32_t>(index), static_cast<uint32_t>(number),
                       static_cast<uint32_t>(number >> 32U), static_cast<uint32_t>(stream) + 1}},
                     key_low, key_high);
    return (static_cast<double>(words.of[0]) + 0.5) * 0x1p-32;
  }
};

struct SparseMixerToken {
  int num_experts;
  int top_k;
  float threshold;  ///< 2 · eps

  /// Share of those that are not the best which count in full, and what else they are.
  static constexpr double kFullShare = 0.25;
  static constexpr float kFactor = 0.3333F;

  /// Whether the expert is none of the first `count` choices.
  TESSERA_HOST_DEVICE_INLINE bool is_left(const int32_t* experts, int count, int expert) const {
    for (int j = 0; j < count; ++j) {
      if (experts[j] == expert) return false;
    }
    return true;
  }
  /// The expert of the largest logit that is left; of equal ones the lowest.
  TESSERA_HOST_DEVICE_INLINE int best_left(const float* logits, const int32_t* experts,
                                           int count) const {
    int best = -1;
    for (int e = 0; e < num_experts; ++e) {
      if (!is_left(experts, count, e)) continue;
      if (best < 0 || logits[e] > logits[best]) best = e;
    }
    return best;
  }
  TESSERA_HOST_DEVICE_INLINE bool is_far(float logit, float largest) const {
    const float size = std::fabs(logit);
    return (largest - logit) / (size > largest ? size : largest) > threshold;
  }
  /// Whether the expert counts for the choice behind the first `count`.
  TESSERA_HOST_DEVICE_INLINE bool counts(const float* logits, const int32_t* experts, int count,
                                         int expert, float largest) const {
    return is_left(experts, count, expert) && !is_far(logits[expert], largest);
  }
  /// Σ exp(logit - largest) of those that count.
  TESSERA_HOST_DEVICE_INLINE float sum_left(const float* logits, const int32_t* experts, int count,
                                            float largest) const {
    float sum = 0;
    for (int e = 0; e < num_experts; ++e) {
      if (counts(logits, experts, count, e, largest)) sum += std::exp(logits[e] - largest);
    }
    return sum;
  }
  /// The probability of choice k, which `experts` has, and those before it.
  TESSERA_HOST_DEVICE_INLINE float probability(const float* logits, const int32_t* experts, int k,
                                               float largest) const {
    if (!counts(logits, experts, k, experts[k], largest)) return 0;
    return std::exp(logits[experts[k]] - largest) / sum_left(logits, experts, k, largest);
  }

  TESSERA_HOST_DEVICE_INLINE void find_probs(const float* logits, const int32_t* experts,
                                             float* probs) const {
    const bool has_experts = experts[0] >= 0;
    for (int k = 0; k < top_k; ++k) {
      probs[k] = has_experts
                     ? probability(logits, experts, k, logits[best_left(logits, experts, k)])
                     : 0.0F;
    }
  }

  /// Draws choice k with the probabilities of those that count: the largest logit with Gumbel noise
  /// (Gumbel-max).
  TESSERA_HOST_DEVICE_INLINE int draw_one(const float* logits, const int32_t* experts, int k,
                                          int best, const SparseMixerNoise& noise) const {
    int drawn = best;
    double most = -INFINITY;
    for (int e = 0; e < num_experts; ++e) {
      if (!counts(logits, experts, k, e, logits[best])) continue;
      const double key =
          static_cast<double>(logits[e]) - std::log(-std::log(noise.uniform(e, 2 * k)));
      if (key > most) {
        most = key;
        drawn = e;
      }
    }
    return drawn;
  }
  TESSERA_HOST_DEVICE_INLINE void draw(const float* logits, const SparseMixerNoise& noise,
                                       int32_t* experts, float* probs) const {
    for (int k = 0; k < top_k; ++k) {
      const int best = best_left(logits, experts, k);
      experts[k] = draw_one(logits, experts, k, best, noise);
      const bool in_full = experts[k] == best || noise.uniform(0, 2 * k + 1) < kFullShare;
      probs[k] = probability(logits, experts, k, logits[best]) * (in_full ? 1.0F : kFactor);
    }
  }

  TESSERA_HOST_DEVICE_INLINE void gradient(const float* logits, const int32_t* experts,
                                           const float* grad, float* grad_logits) const {
    for (int e = 0; e < num_experts; ++e) grad_logits[e] = 0;
    if (experts[0] < 0) return;
    for (int k = 0; k < top_k; ++k) {
      const float largest = logits[best_left(logits, experts, k)];
      const float of_choice = grad[k] * probability(logits, experts, k, largest);
      const float sum = sum_left(logits, experts, k, largest);
      for (int e = 0; e < num_experts; ++e) {
        if (counts(logits, experts, k, e, largest))
          grad_logits[e] -= of_choice * (std::exp(logits[e] - largest) / sum);
      }
      grad_logits[experts[k]] += of_choice;
    }
  }
};

}  // namespace tessera
