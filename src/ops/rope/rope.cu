// A thread holds the same two vectors of several heads of a token, whose angles it works out once;
// of fewer where a token has few, so that there are threads enough to keep the memory busy. Of two
// tensors the first threads of a token take the first's heads, the others the second's.
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
  RopeHeads second;
  Divider items;  // of a head
  int groups;     // of threads for a token's heads in the first tensor
  int second_groups;

  /// A thread's heads: every `stride`-th of a tensor's row.
  struct Heads {
    const T* x;
    T* y;
    int count;  // of the row
    int first;
    int stride;

    __device__ __forceinline__ bool has(int j) const { return first + j * stride < count; }
    __device__ __forceinline__ int64_t at(int j, int head_size) const {
      return static_cast<int64_t>(first + j * stride) * head_size;
    }
  };

  __device__ __forceinline__ Heads heads(int64_t row, uint32_t number) const {
    const int group = static_cast<int>(number);
    const bool in_first = group < groups;
    const int count = in_first ? p.num_heads : second.num_heads;
    const int64_t start = row * count * p.head_size;
    return {static_cast<const T*>(in_first ? p.x : second.x) + start,
            static_cast<T*>(in_first ? p.y : second.y) + start, count,
            in_first ? group : group - groups, in_first ? groups : second_groups};
  }
  __device__ RopePlaces places(uint32_t item) const {
    return rope_places<kWidth, kInterleaved>(p, static_cast<int>(item));
  }

  __device__ Loaded load(int64_t row, uint32_t vector) const {
    const uint32_t group = items.quotient(vector);
    const RopePlaces at = places(vector - group * items.divisor());
    const Heads own = heads(row, group);
    Loaded loaded;
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      if (!own.has(j)) continue;
      const T* x = own.x + own.at(j, p.head_size);
      loaded.first[j] = load_pack<kWidth>(x + at.first);
      if (at.second >= 0) loaded.second[j] = load_pack<kWidth>(x + at.second);
    }
    return loaded;
  }

  __device__ void store(int64_t row, uint32_t vector, const Loaded& loaded) const {
    const uint32_t group = items.quotient(vector);
    const RopePlaces at = places(vector - group * items.divisor());
    const Heads own = heads(row, group);
    SinCos turns[kWidth];
    if (at.pair >= 0) find_turns(turns, p, row, at.pair);
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      if (!own.has(j)) continue;
      T* y = own.y + own.at(j, p.head_size);
      if (at.pair >= 0) {
        store_turned(y, at, loaded.first[j], loaded.second[j], turns);
      } else {
        cuda::store(y + at.first, loaded.first[j]);
        if (at.second >= 0) cuda::store(y + at.second, loaded.second[j]);
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
void launch_heads(const RopeRows& call, const RopeHeads& second, cudaStream_t stream) {
  const auto items = static_cast<uint32_t>(rope_items<kWidth>(call));
  const auto groups = static_cast<int>(divide_up(call.num_heads, kHeads));
  const auto second_groups = static_cast<int>(divide_up(second.num_heads, kHeads));
  launch_map(
      RopeMap<T, kWidth, kInterleaved, kHeads>{call, second, Divider(items), groups, second_groups},
      call.rows, int64_t{items} * (groups + second_groups), stream);
}

template <typename T, int kWidth, bool kInterleaved>
void launch(const RopeRows& call, const RopeHeads& second, cudaStream_t stream) {
  call.num_heads < kManyHeads ? launch_heads<T, kWidth, kInterleaved, 2>(call, second, stream)
                              : launch_heads<T, kWidth, kInterleaved, 4>(call, second, stream);
}

}  // namespace

void launch_rope(const RopeRows& call, const RopeHeads& second, cudaStream_t stream) {
  const bool vectors = are_whole_vectors(call.dtype, call.head_size, call.offset, call.num_pairs) &&
                       are_aligned(call.x, call.y, second.x, second.y);
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    call.interleaved ? launch<T, kWidth, true>(call, second, stream)
                     : launch<T, kWidth, false>(call, second, stream);
  });
}

}  // namespace tessera::cuda
