#pragma once

#include <array>

#include "ops/rope/rope.h"
#include "ops/simd.h"

/// The rotation of single heads on the CPU.
namespace tessera {

/// The sines and cosines of one token's angles, which all its heads share.
struct TokenAngles {
  std::array<float, Rope::kMaxRotaryDim / 2> cosines;
  std::array<float, Rope::kMaxRotaryDim / 2> sines;

  void fill(const RotarySpec& spec, int32_t position, bool inverse) {
    const float sine_amplitude = inverse ? -spec.amplitude : spec.amplitude;
    const float* frequencies = spec.inverse_frequencies.data();
    const auto count = static_cast<int64_t>(spec.inverse_frequencies.size());
    simd::for_each_vector(count, [&](int64_t i, auto lanes) {
      const simd::SinCos turn =
          simd::sincos(simd::load(frequencies + i, lanes) * static_cast<float>(position));
      simd::store(cosines.data() + i, turn.cosine * spec.amplitude, lanes);
      simd::store(sines.data() + i, turn.sine * sine_amplitude, lanes);
    });
  }
};

/// Elements i and i + pairs turn together.
template <typename To, typename From>
void rotate_halves(To* y, const From* x, const TokenAngles& angles, int64_t pairs) {
  const float* cosines = angles.cosines.data();
  const float* sines = angles.sines.data();
  simd::for_each_vector(pairs, [=](int64_t i, auto lanes) {
    const simd::Vec first = simd::load(x + i, lanes);
    const simd::Vec second = simd::load(x + pairs + i, lanes);
    const simd::Vec cosine = simd::load(cosines + i, lanes);
    const simd::Vec sine = simd::load(sines + i, lanes);
    simd::store(y + i, first * cosine - second * sine, lanes);
    simd::store(y + pairs + i, second * cosine + first * sine, lanes);
  });
}

/// Elements 2i and 2i + 1 turn together.
template <typename To, typename From>
void rotate_neighbours(To* y, const From* x, const TokenAngles& angles, int64_t pairs) {
  for (int64_t i = 0; i < pairs; ++i) {
    const auto first = static_cast<float>(x[2 * i]);
    const auto second = static_cast<float>(x[2 * i + 1]);
    y[2 * i] = To(first * angles.cosines[i] - second * angles.sines[i]);
    y[2 * i + 1] = To(second * angles.cosines[i] + first * angles.sines[i]);
  }
}

/// One head, which may be rounded to another type.
template <typename To, typename From>
void rotate_head(To* y, const From* x, const TokenAngles& angles, const RotarySpec& spec) {
  const int64_t pairs = spec.rotary_dim() / 2;
  const int64_t end = spec.offset + spec.rotary_dim();
  simd::convert(y, x, spec.offset);
  if (spec.interleaved) {
    rotate_neighbours(y + spec.offset, x + spec.offset, angles, pairs);
  } else {
    rotate_halves(y + spec.offset, x + spec.offset, angles, pairs);
  }
  simd::convert(y + end, x + end, spec.head_size - end);
}

}  // namespace tessera
