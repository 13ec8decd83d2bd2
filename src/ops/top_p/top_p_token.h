#pragma once

#include <cstdint>

#include "core/host_device.h"

/// One token's part of TopP, the same on CPUs and GPUs.
namespace tessera {

struct TopPToken {
  int top_k;
  float share;
  bool normalize;
  float scale;

  /// How many of the token's choices are kept, and their sum.
  TESSERA_HOST_DEVICE_INLINE int count_kept(const float* probs, float& sum) const {
    int count = 0;
    sum = 0;
    do {
      sum += probs[count++];
    } while (count < top_k && sum < share);
    return count;
  }
  TESSERA_HOST_DEVICE_INLINE float divisor(float sum) const {
    return normalize ? sum + 1e-20F : 1.0F;
  }
  /// Writes what is kept; returns how many.
  TESSERA_HOST_DEVICE_INLINE int keep(const float* probs, const int32_t* experts, float* kept_probs,
                                      int32_t* kept) const {
    float sum = 0;
    const int count = count_kept(probs, sum);
    for (int k = 0; k < top_k; ++k) {
      kept_probs[k] = k < count ? probs[k] / divisor(sum) * scale : 0.0F;
      kept[k] = k < count ? experts[k] : -1;
    }
    return count;
  }
  TESSERA_HOST_DEVICE_INLINE void gradient(const float* probs, const int32_t* kept,
                                           const float* grad, float* grad_probs) const {
    float sum = 0;
    float mean = 0;  // of the gradient, weighted by the normalised scores
    if (normalize) {
      for (int k = 0; k < top_k; ++k) sum += kept[k] >= 0 ? probs[k] : 0.0F;
      for (int k = 0; k < top_k; ++k)
        mean += kept[k] >= 0 ? probs[k] / divisor(sum) * grad[k] : 0.0F;
    }
    for (int k = 0; k < top_k; ++k)
      grad_probs[k] = kept[k] >= 0 ? scale / divisor(sum) * (grad[k] - mean) : 0.0F;
  }
};

}  // namespace tessera
