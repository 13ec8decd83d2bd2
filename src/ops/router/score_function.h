#pragma once

#include <cmath>
#include <cstdint>
#include <string_view>

#include "core/host_device.h"

namespace tessera {

/// How a router scores experts by their logits. All but a softmax's are of one logit each, and need
/// not sum to 1.
enum class ScoreFunction : uint8_t {
  kSoftmax,
  kSigmoid,       ///< DeepSeek-V3 (2024), section 2.1.2
  kSqrtSoftplus,  ///< the root of ln(1 + e^logit), which no expert saturates (DeepSeek-V4)
};

constexpr std::string_view score_name(ScoreFunction score) {
  switch (score) {
    case ScoreFunction::kSoftmax:
      return "softmax";
    case ScoreFunction::kSigmoid:
      return "sigmoid";
    case ScoreFunction::kSqrtSoftplus:
      return "sqrtsoftplus";
  }
  return "unknown";
}

/// The root of ln(1 + e^logit), without overflow; 0 for minus infinity.
TESSERA_HOST_DEVICE_INLINE float sqrt_softplus(float logit) {
  const float positive = logit > 0.0F ? logit : 0.0F;
  // NaN stays.
  return std::sqrt(positive + std::log1p(std::exp(-std::fabs(logit))));
}

/// A score's derivative by its logit, divided by the score, of the score alone (not of a softmax):
/// for a sigmoid 1 - s. With s = sqrt(ln(1 + e^l)), the sigmoid of l is 1 - e^(-s²), so that it is
/// (1 - e^(-s²)) / 2s².
TESSERA_HOST_DEVICE_INLINE float relative_slope(ScoreFunction score, float s) {
  if (score == ScoreFunction::kSigmoid) return 1.0F - s;
  const float square = s * s;
  return square > 0.0F ? -0.5F * std::expm1(-square) / square : 0.5F;
}

}  // namespace tessera
