#pragma once

#include "ops/simd.h"

namespace tessera {

/// tanh(x) with a relative error below 5e-7: near 0, where a difference of exponentials would
/// cancel, by its series, whose next term is below 1e-8 of it.
inline simd::Vec hyperbolic_tangent(simd::Vec x) {
  constexpr float kNear = 0.35F;
  const simd::Vec square = x * x;
  simd::Vec p = square * -8.8632355e-3F + 2.1869489e-2F;
  p = p * square - 5.3968254e-2F;
  p = p * square + 1.3333333e-1F;
  p = p * square - 3.3333333e-1F;
  const simd::Vec series = x + x * square * p;
  const simd::Vec magnitude = x < 0.0F ? -x : x;
  const simd::Vec far = 1.0F - 2.0F / (simd::exp(2.0F * magnitude) + 1.0F);
  const simd::Vec by_exponential = x < 0.0F ? -far : far;
  return magnitude < kNear ? series : by_exponential;
}

/// cap · tanh(x / cap).
inline simd::Vec capped_softly(simd::Vec x, float cap) {
  return cap * hyperbolic_tangent(x / cap);
}

}  // namespace tessera
