#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/fp8.h"
#include "ops/round_values/cast_spec.h"

/// The arithmetic of RoundValues, number by number.
namespace tessera {

/// Scales of smaller values would not be normal numbers.
constexpr float kSmallestRounded = 0x1p-100F;

/// The least power of two that, times `largest`, is not below `amax`, which is finite.
inline float least_scale(float amax, float largest) {
  amax = std::max(amax, kSmallestRounded);
  int exponent = 0;
  std::frexp(amax / largest, &exponent);
  const float scale = std::ldexp(1.0F, exponent - 1);
  return largest * scale < amax ? scale * 2 : scale;
}

/// `value` as a number of the type, or with its sign the largest: the nearest one.
template <typename Number>
float round_nearest(float value) {
  return static_cast<float>(Number(value));
}

/// One of the two numbers around `value`, the upper one where `uniform`, of [0, 1), is below what
/// `value` has come of the way to it.
template <typename Number>
float round_up_as_often(float value, float uniform) {
  const float magnitude = std::abs(value);
  if (!(magnitude < round_nearest<Number>(INFINITY))) return round_nearest<Number>(value);
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  const float step = std::max(std::ldexp(1.0F, exponent - 1 - Number::kDigits), Number::kSmallest);
  const float steps = magnitude / step;
  const float lower = std::floor(steps);
  return std::copysign((uniform < steps - lower ? lower + 1 : lower) * step, value);
}

/// Signs of the rotation, drawn once: bit i turns value i.
constexpr uint32_t kRotationSigns = 0xb8d2;

/// Turns `values` by signs and a Hadamard matrix of size `count`, a power of two up to 16
/// (Sylvester's construction), over the root of that.
inline void rotate(float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    if ((kRotationSigns >> i & 1U) != 0) values[i] = -values[i];
  for (int64_t half = 1; half < count; half *= 2) {
    for (int64_t i = 0; i < count; ++i) {
      if ((i & half) != 0) continue;
      const float sum = values[i] + values[i + half];
      values[i + half] = values[i] - values[i + half];
      values[i] = sum;
    }
  }
  const float factor = 1 / std::sqrt(static_cast<float>(count));
  for (int64_t i = 0; i < count; ++i) values[i] *= factor;
}

}  // namespace tessera
