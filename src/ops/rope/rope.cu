// A thread holds the same two vectors of several heads of a token, whose angles it works out once;
// of fewer where a token has few, so that there are threads enough to keep the memory busy.
#include "ops/rope/rope_device.cuh"

namespace tessera::cuda {
namespace {

constexpr int kManyHeads = 16;  // of a token, from which on a thread takes four

template <typename T, int kWidth, bool kInterleaved, int kHeads>
struct RopeMap {
  static constexpr int kUnroll = 1;
  static constexpr int kBlocks = kHeads > 2 ? 3 : 4;
  struct Loaded {
    Pack<T, kWidth> first[kHeads];
    Pack<T, kWidth> second[kHeads];
  };
  RopeRows p;
  Divider items;    // of a head
  uint32_t groups;  // of threads for a token's heads

  __device__ RopePlaces places(uint32_t item) const {
    return rope_places<kWidth, kInterleaved>(p, static_cast<int>(item));
  }
  __device__ int64_t head_at(int64_t row, uint32_t group, int j) const {
    const uint32_t head = group + j * groups;
    if (head >= static_cast<uint32_t>(p.num_heads)) return -1;
    return (row * p.num_heads + head) * p.head_size;
  }

  __device__ Loaded load(int64_t row, uint32_t vector) const {
    const uint32_t group = items.quotient(vector);
    const RopePlaces at = places(vector - group * items.divisor());
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
    const RopePlaces at = places(vector - group * items.divisor());
    T* y = static_cast<T*>(p.y);
    SinCos turns[kWidth];
    if (at.pair >= 0) find_turns(turns, p, row, at.pair);
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

  __device__ void store_turned(T* head, const RopePlaces& at, const Pack<T, kWidth>& first,
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

template <typename T, int kWidth, bool kInterleaved, int kHeads>
void launch_heads(const RopeRows& call, cudaStream_t stream) {
  const auto items = static_cast<uint32_t>(rope_items<kWidth>(call));
  const auto groups = static_cast<uint32_t>(divide_up(call.num_heads, kHeads));
  launch_map(RopeMap<T, kWidth, kInterleaved, kHeads>{call, Divider(items), groups}, call.rows,
             int64_t{items} * groups, stream);
}

template <typename T, int kWidth, bool kInterleaved>
void launch(const RopeRows& call, cudaStream_t stream) {
  call.num_heads < kManyHeads ? launch_heads<T, kWidth, kInterleaved, 2>(call, stream)
                              : launch_heads<T, kWidth, kInterleaved, 4>(call, stream);
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
