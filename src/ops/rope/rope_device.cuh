#pragma once

#include "ops/cuda/vector.cuh"
#include "ops/rope/rope_kernels.h"

/// The rotation as the threads of a kernel share it: an item is two vectors of a head, of the
/// rotated part those that turn together, or else any two.
namespace tessera::cuda {

struct SinCos {
  float sine;
  float cosine;
};

/// As simd::sincos: the quadrant is removed in double, and Cephes' polynomials (sinf, cosf) take
/// |r| <= π/4.
__device__ __forceinline__ SinCos sine_and_cosine(float x) {
  const double wide = x;
  const double turns = rint(wide * 0.636619772367581343);
  const auto r = static_cast<float>(fma(turns, -1.57079632679489662, wide));
  const int quadrant = static_cast<int>(turns);
  const float r2 = r * r;
  float s = r2 * -1.9515295891e-4F + 8.3321608736e-3F;
  s = (s * r2 - 1.6666654611e-1F) * (r2 * r) + r;
  float c = r2 * 2.443315711809948e-5F - 1.388731625493765e-3F;
  c = (c * r2 + 4.166664568298827e-2F) * (r2 * r2) - 0.5F * r2 + 1.0F;
  const bool swap = (quadrant & 1) != 0;
  const float sine = swap ? c : s;
  const float cosine = swap ? s : c;
  return {(quadrant & 2) != 0 ? -sine : sine, ((quadrant + 1) & 2) != 0 ? -cosine : cosine};
}

/// Where an item lies in a head.
struct RopePlaces {
  int first;
  int second;  // -1: there is none
  int pair;    // of the first element; -1: not rotated
};

/// Items of a head.
template <int kWidth>
__host__ __device__ int rope_items(const RopeRows& p) {
  const int passed = (p.head_size - 2 * p.num_pairs) / kWidth;
  return p.num_pairs / kWidth + (passed + 1) / 2;
}

/// Where the vector with this number lies among those that pass through; -1: there is none.
template <int kWidth>
__device__ __forceinline__ int passed_place(const RopeRows& p, int vector) {
  const int at = vector * kWidth;
  const int after = at < p.offset ? at : at + 2 * p.num_pairs;
  return after < p.head_size ? after : -1;
}

template <int kWidth, bool kInterleaved>
__device__ __forceinline__ RopePlaces rope_places(const RopeRows& p, int item) {
  const int rotated = p.num_pairs / kWidth;
  if (item < rotated) {
    if constexpr (kInterleaved) {
      const int at = p.offset + item * 2 * kWidth;
      return {at, at + kWidth, item * kWidth};
    } else {
      const int at = p.offset + item * kWidth;
      return {at, at + p.num_pairs, item * kWidth};
    }
  }
  const int vector = 2 * (item - rotated);
  return {passed_place<kWidth>(p, vector), passed_place<kWidth>(p, vector + 1), -1};
}

/// The turn of a pair of a row.
__device__ __forceinline__ SinCos find_turn(const RopeRows& p, int64_t row, int pair) {
  const auto position = static_cast<float>(p.positions[row]);
  const SinCos turn = sine_and_cosine(p.frequencies[pair] * position);
  return {turn.sine * p.sine_amplitude, turn.cosine * p.cosine_amplitude};
}

/// The turns of kWidth pairs of a row.
template <int kWidth>
__device__ __forceinline__ void find_turns(SinCos (&turns)[kWidth], const RopeRows& p, int64_t row,
                                           int pair) {
  const auto position = static_cast<float>(p.positions[row]);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    turns[i] = sine_and_cosine(p.frequencies[pair + i] * position);
    turns[i].sine *= p.sine_amplitude;
    turns[i].cosine *= p.cosine_amplitude;
  }
}

}  // namespace tessera::cuda
