#pragma once

#include <cmath>
#include <cstdint>

#include "core/fp8.h"
#include "ops/power_scale.h"
#include "ops/round_values/cast_spec.h"

/// The arithmetic of RoundValues, number by number, on CPUs and GPUs. Always inlined, so that
/// sources for several CPU levels share no function.
namespace tessera {

/// The nearest number of the type, to even, and of what is beyond the largest that one: as
/// `Number(value)`, without branches.
template <typename Number>
TESSERA_HOST_DEVICE_INLINE float round_nearest(float value) {
  constexpr int kShift = 23 - Number::kDigits;
  constexpr uint32_t kHalf = (1U << (kShift - 1)) - 1;
  constexpr float kSmallestNormal = Number::kSmallest * (1U << Number::kDigits);
  // A number whose last digit is worth the smallest number.
  constexpr float kUnit = Number::kSmallest * 0x1p23F;
  const auto bits = word_of_float(value);
  const uint32_t magnitude = bits & 0x7fffffffU;
  const float size = float_of_word(magnitude);
  const float normal =
      float_of_word((magnitude + kHalf + (magnitude >> kShift & 1U)) & ~((1U << kShift) - 1));
  float rounded = size < kSmallestNormal ? (size + kUnit) - kUnit : normal;
  rounded = rounded > Number::kLargest ? Number::kLargest : rounded;
  rounded = magnitude > 0x7f800000U ? size : rounded;
  return float_of_word(word_of_float(rounded) | (bits & 0x80000000U));
}

/// One of the two numbers around `value`, the upper one where `uniform`, of [0, 1), is below what
/// `value` has come of the way to it.
template <typename Number>
TESSERA_HOST_DEVICE_INLINE float round_up_as_often(float value, float uniform) {
  const float size = std::abs(value);
  // The power of two below it, and so the distance of its neighbours.
  const float power = float_of_word(word_of_float(size) & 0x7f800000U);
  const float own_step = power * (1.0F / (1U << Number::kDigits));
  const float step = own_step > Number::kSmallest ? own_step : Number::kSmallest;
  const float steps = size / step;
  const float lower = std::floor(steps);
  const float rounded = (uniform < steps - lower ? lower + 1 : lower) * step;
  return size < Number::kLargest ? std::copysign(rounded, value) : round_nearest<Number>(value);
}

/// Random bits of a value and its place: a finaliser of MurmurHash3.
TESSERA_HOST_DEVICE_INLINE uint32_t hash_place(uint32_t value, uint32_t place) {
  uint32_t word = value ^ place * 0x9e3779b9U;
  word = (word ^ (word >> 16)) * 0x85ebca6bU;
  word = (word ^ (word >> 13)) * 0xc2b2ae35U;
  return word ^ (word >> 16);
}

/// By what a block's rounded values are multiplied, of its largest magnitude and the power of two
/// of its group (1 but for nested scales): 0 where all of them are too small for it, NaN where one
/// is infinite.
template <typename Number>
TESSERA_HOST_DEVICE_INLINE float scale_of_block(float amax, float unit, bool nested) {
  if (!nested) return power_scale<Number>(amax);
  if (!(amax < INFINITY)) return NAN;
  return round_nearest<E4m3>(amax / Number::kLargest / unit) * unit;
}

/// The power of two of a group's nested scales.
template <typename Number>
TESSERA_HOST_DEVICE_INLINE float unit_of_group(float amax) {
  return amax < INFINITY ? least_scale(amax, Number::kLargest * E4m3::kLargest) : 1.0F;
}

/// A value over its scale; of a scale of 0 a zero, or NaN.
TESSERA_HOST_DEVICE_INLINE float divide_by_scale(float value, float scale) {
  return scale == 0 ? value * 0.0F : value / scale;
}

/// What a delayed scale makes of values.
struct DelayedScale {
  float scale;    ///< 0: not known, values stay as they are
  float inverse;  ///< of a power of two exact
  float limit;    ///< what values beyond become
  float beyond;   ///< the magnitude beyond which they are
};

template <typename Number>
TESSERA_HOST_DEVICE_INLINE DelayedScale delayed_scale(float scale, bool overflows) {
  if (scale == 0) return {0, 0, 0, INFINITY};
  const float largest = Number::kLargest * scale;
  return {scale, 1 / scale, overflows ? NAN : largest, largest};
}

/// A finite value by its scale.
template <typename Number>
TESSERA_HOST_DEVICE_INLINE float round_delayed(float value, const DelayedScale& by) {
  if (by.scale == 0) return value;
  const float rounded = round_nearest<Number>(value * by.inverse) * by.scale;
  return std::abs(value) > by.beyond ? std::copysign(by.limit, value) : rounded;
}

/// The scale for values up to `amax`, with room for `margin` powers of two more; 0 where nothing is
/// known of them.
TESSERA_HOST_DEVICE_INLINE float scale_for(float amax, float largest, int margin) {
  return amax > 0 ? least_scale(amax, largest) * std::ldexp(1.0F, margin) : 0.0F;
}

/// Of [0, 1), of the value and its place in the matrix.
TESSERA_HOST_DEVICE_INLINE float uniform_of(float value, uint32_t place) {
  const uint32_t random = hash_place(word_of_float(value), place);
  return static_cast<float>(static_cast<int32_t>(random >> 8)) * 0x1p-24F;
}

/// Signs of the rotation, drawn once: bit i turns value i.
constexpr uint32_t kRotationSigns = 0xb8d2;

}  // namespace tessera
