#include <array>
#include <cstring>

#include "ops/rope/rope.h"
#include "ops/simd.h"
#include "ops/storage.h"

namespace tessera {
namespace {

using simd::load;
using simd::store;
using simd::Vec;

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
          simd::sincos(load(frequencies + i, lanes) * static_cast<float>(position));
      store(cosines.data() + i, turn.cosine * spec.amplitude, lanes);
      store(sines.data() + i, turn.sine * sine_amplitude, lanes);
    });
  }
};

/// Elements i and i + pairs turn together.
template <typename T>
void rotate_halves(T* y, const T* x, const TokenAngles& angles, int64_t pairs) {
  const float* cosines = angles.cosines.data();
  const float* sines = angles.sines.data();
  simd::for_each_vector(pairs, [=](int64_t i, auto lanes) {
    const Vec first = load(x + i, lanes);
    const Vec second = load(x + pairs + i, lanes);
    const Vec cosine = load(cosines + i, lanes);
    const Vec sine = load(sines + i, lanes);
    store(y + i, first * cosine - second * sine, lanes);
    store(y + pairs + i, second * cosine + first * sine, lanes);
  });
}

/// Elements 2i and 2i + 1 turn together.
template <typename T>
void rotate_neighbours(T* y, const T* x, const TokenAngles& angles, int64_t pairs) {
  for (int64_t i = 0; i < pairs; ++i) {
    const auto at = static_cast<size_t>(i);
    const auto first = static_cast<float>(x[2 * i]);
    const auto second = static_cast<float>(x[2 * i + 1]);
    y[2 * i] = T(first * angles.cosines[at] - second * angles.sines[at]);
    y[2 * i + 1] = T(second * angles.cosines[at] + first * angles.sines[at]);
  }
}

template <typename T>
void rotate_head(T* y, const T* x, const TokenAngles& angles, const RotarySpec& spec) {
  const int64_t pairs = spec.rotary_dim() / 2;
  const int64_t end = spec.offset + spec.rotary_dim();
  std::copy(x, x + spec.offset, y);
  if (spec.interleaved) {
    rotate_neighbours(y + spec.offset, x + spec.offset, angles, pairs);
  } else {
    rotate_halves(y + spec.offset, x + spec.offset, angles, pairs);
  }
  std::copy(x + end, x + spec.head_size, y + end);
}

void rope(const Operator& op, const KernelArgs& args) {
  const auto& rotation = static_cast<const Rope&>(op);
  const RotarySpec& spec = rotation.spec();
  const Tensor& x = args.in(0);
  const int64_t tokens = x.shape[0];
  const int32_t* positions = args.in(1).as<int32_t>();
  with_storage(x.dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* from = x.as<T>();
    T* to = args.out(0).as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
      TokenAngles angles;
      angles.fill(spec, positions[t], rotation.inverse());
      for (int64_t head = 0; head < spec.num_heads; ++head) {
        const int64_t at = (t * spec.num_heads + head) * spec.head_size;
        rotate_head(to + at, from + at, angles, spec);
      }
    }
  });
}

}  // namespace

void add_rope_cpu(KernelTable& table) {
  table["rope"] = rope;
  table["rope_backward"] = rope;
}

}  // namespace tessera
