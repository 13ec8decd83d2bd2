// A thread holds the same two vectors of several heads of a token, whose angles it works out once.
#include "ops/rope/rope_kernels.h"

#include "ops/cuda/vector.cuh"

namespace tessera::cuda {
namespace {

constexpr int kHeads = 4;  // of a thread

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

/// An item is two vectors of a head: of the rotated part those that turn together, or else any two.
template <typename T, int kWidth, bool kInterleaved>
struct RopeMap {
  static constexpr int kUnroll = 1;
  static constexpr int kBlocks = 3;
  struct Loaded {
    Pack<T, kWidth> first[kHeads];
    Pack<T, kWidth> second[kHeads];
  };
  struct Places {
    int first;
    int second;  // -1: there is none
    int pair;    // of the first element; -1: not rotated
  };

  RopeRows p;
  Divider items;    // of a head
  uint32_t groups;  // of threads for a token's heads

  /// Where the item's vectors lie in a head.
  __device__ Places places(int item) const {
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
    return {passed(vector), passed(vector + 1), -1};
  }
  /// Where the vector with this number lies among those that pass through.
  __device__ int passed(int vector) const {
    const int at = vector * kWidth;
    const int after = at < p.offset ? at : at + 2 * p.num_pairs;
    return after < p.head_size ? after : -1;
  }
  __device__ int64_t head_at(int64_t row, uint32_t group, int j) const {
    const uint32_t head = group + j * groups;
    if (head >= static_cast<uint32_t>(p.num_heads)) return -1;
    return (row * p.num_heads + head) * p.head_size;
  }

  __device__ Loaded load(int64_t row, uint32_t vector) const {
    const uint32_t group = items.quotient(vector);
    const Places at = places(static_cast<int>(vector - group * items.divisor()));
    const T* x = static_cast<const T*>(p.x);
    Loaded loaded;
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      const int64_t head = head_at(row, group, j);
      if (head < 0) continue;
      loaded.first[j] = load_pack<kWidth>(x + head + at.first);
      if (at.second >= 0) loaded.second[j] = load_pack<kWidth>(x + head + at.second);
    }
    return loaded;
  }

  __device__ void store(int64_t row, uint32_t vector, const Loaded& loaded) const {
    const uint32_t group = items.quotient(vector);
    const Places at = places(static_cast<int>(vector - group * items.divisor()));
    T* y = static_cast<T*>(p.y);
    SinCos turns[kWidth];
    if (at.pair >= 0) find_turns(turns, row, at.pair);
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      const int64_t head = head_at(row, group, j);
      if (head < 0) continue;
      if (at.pair >= 0) {
        store_turned(y + head, at, loaded.first[j], loaded.second[j], turns);
      } else {
        cuda::store(y + head + at.first, loaded.first[j]);
        if (at.second >= 0) cuda::store(y + head + at.second, loaded.second[j]);
      }
    }
  }

  __device__ void find_turns(SinCos (&turns)[kWidth], int64_t row, int pair) const {
    const auto position = static_cast<float>(p.positions[row]);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      turns[i] = sine_and_cosine(p.frequencies[pair + i] * position);
      turns[i].sine *= p.sine_amplitude;
      turns[i].cosine *= p.cosine_amplitude;
    }
  }

  __device__ void store_turned(T* head, const Places& at, const Pack<T, kWidth>& first,
                               const Pack<T, kWidth>& second, const SinCos (&turns)[kWidth]) const {
    float x[2 * kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      x[i] = static_cast<float>(first.at[i]);
      x[kWidth + i] = static_cast<float>(second.at[i]);
    }
    constexpr int kStep = kInterleaved ? 2 : 1;  // from pair to pair
    constexpr int kPartner = kInterleaved ? 1 : kWidth;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float a = x[i * kStep];
      const float b = x[i * kStep + kPartner];
      x[i * kStep] = a * turns[i].cosine - b * turns[i].sine;
      x[i * kStep + kPartner] = b * turns[i].cosine + a * turns[i].sine;
    }
    Floats<kWidth> turned[2];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      turned[0][i] = x[i];
      turned[1][i] = x[kWidth + i];
    }
    cuda::store(head + at.first, turned[0]);
    cuda::store(head + at.second, turned[1]);
  }
};

template <typename T, int kWidth, bool kInterleaved>
void launch(const RopeRows& call, cudaStream_t stream) {
  const int passed = (call.head_size - 2 * call.num_pairs) / kWidth;
  const auto items = static_cast<uint32_t>(call.num_pairs / kWidth + divide_up(passed, 2));
  const auto groups = static_cast<uint32_t>(divide_up(call.num_heads, kHeads));
  launch_map(RopeMap<T, kWidth, kInterleaved>{call, Divider(items), groups}, call.rows,
             int64_t{items} * groups, stream);
}

}  // namespace

void launch_rope(const RopeRows& call, cudaStream_t stream) {
  const bool vectors = are_whole_vectors(call.dtype, call.head_size, call.offset, call.num_pairs) &&
                       are_aligned(call.x, call.y);
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    call.interleaved ? launch<T, kWidth, true>(call, stream)
                     : launch<T, kWidth, false>(call, stream);
  });
}

}  // namespace tessera::cuda
