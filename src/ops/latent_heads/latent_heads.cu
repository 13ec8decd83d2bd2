#include "ops/latent_heads/latent_heads_kernels.h"

#include "ops/cuda/vector.cuh"

namespace tessera::cuda {
namespace {

/// Of every head, first the vectors of its key and then those of its value.
template <typename T, int kWidth>
struct ForwardMap {
  static constexpr int kUnroll = 2;
  static constexpr int kBlocks = 6;
  using Loaded = Pack<T, kWidth>;

  int num_heads;
  int nope;
  int rope;
  int value;
  Divider head_vectors;
  const T* kv;
  const T* shared;
  T* keys;
  T* values;

  __device__ Loaded load(int64_t row, uint32_t vector) const {
    const uint32_t head_idx = head_vectors.quotient(vector);
    const int64_t head = row * num_heads + head_idx;
    const int at = static_cast<int>(vector - head_idx * head_vectors.divisor()) * kWidth;
    if (at >= nope && at < nope + rope) return load_pack<kWidth>(shared + row * rope + at - nope);
    return load_pack<kWidth>(kv + head * (nope + value) + (at < nope ? at : at - rope));
  }
  __device__ void store(int64_t row, uint32_t vector, const Loaded& loaded) const {
    const uint32_t head_idx = head_vectors.quotient(vector);
    const int64_t head = row * num_heads + head_idx;
    const int at = static_cast<int>(vector - head_idx * head_vectors.divisor()) * kWidth;
    const int key = nope + rope;
    cuda::store(at < key ? keys + head * key + at : values + head * value + at - key, loaded);
  }
};

template <typename T, int kWidth>
struct BackwardMap {
  static constexpr int kUnroll = 2;
  static constexpr int kBlocks = 6;
  using Loaded = Pack<T, kWidth>;

  int num_heads;
  int nope;
  int rope;
  int value;
  Divider head_vectors;
  const T* keys;
  const T* values;
  T* kv;

  __device__ Loaded load(int64_t row, uint32_t vector) const {
    const uint32_t head_idx = head_vectors.quotient(vector);
    const int64_t head = row * num_heads + head_idx;
    const int at = static_cast<int>(vector - head_idx * head_vectors.divisor()) * kWidth;
    return load_pack<kWidth>(at < nope ? keys + head * (nope + rope) + at
                                       : values + head * value + at - nope);
  }
  __device__ void store(int64_t row, uint32_t vector, const Loaded& loaded) const {
    cuda::store(kv + row * num_heads * (nope + value) + vector * kWidth, loaded);
  }
};

/// The sums over a token's heads of the gradients of the shared part.
template <typename T, int kWidth>
struct SharedMap {
  static constexpr int kUnroll = 1;
  static constexpr int kBlocks = 4;
  using Loaded = Floats<kWidth>;

  int num_heads;
  int nope;
  int rope;
  const T* keys;
  T* shared;

  __device__ Loaded load(int64_t row, uint32_t vector) const {
    const int key = nope + rope;
    const T* first = keys + row * num_heads * key + nope + vector * kWidth;
    Floats<kWidth> total = {};
#pragma unroll 8
    for (int head = 0; head < num_heads; ++head) {
      const Floats<kWidth> term = cuda::load<kWidth>(first + static_cast<int64_t>(head) * key);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) total[i] += term[i];
    }
    return total;
  }
  __device__ void store(int64_t row, uint32_t vector, const Loaded& total) const {
    cuda::store(shared + row * rope + vector * kWidth, total);
  }
};

bool have_whole_vectors(const LatentHeadsSizes& s) {
  return are_whole_vectors(s.dtype, s.nope, s.rope, s.value);
}

}  // namespace

void launch_latent_heads(const LatentHeadsSizes& s, const LatentHeadsForward& call,
                         cudaStream_t stream) {
  const bool vectors =
      have_whole_vectors(s) && are_aligned(call.kv, call.shared, call.keys, call.values);
  with_vectors(s.dtype, vectors, [&]<typename T, int kWidth>() {
    launch_map(
        ForwardMap<T, kWidth>{s.num_heads, s.nope, s.rope, s.value,
                              Divider((s.nope + s.rope + s.value) / kWidth),
                              static_cast<const T*>(call.kv), static_cast<const T*>(call.shared),
                              static_cast<T*>(call.keys), static_cast<T*>(call.values)},
        s.rows, int64_t{s.num_heads} * (s.nope + s.rope + s.value) / kWidth, stream);
  });
}

void launch_latent_heads_backward(const LatentHeadsSizes& s, const LatentHeadsGrads& call,
                                  cudaStream_t stream) {
  const bool vectors =
      have_whole_vectors(s) && are_aligned(call.kv, call.shared, call.keys, call.values);
  with_vectors(s.dtype, vectors, [&]<typename T, int kWidth>() {
    const T* keys = static_cast<const T*>(call.keys);
    launch_map(BackwardMap<T, kWidth>{s.num_heads, s.nope, s.rope, s.value,
                                      Divider((s.nope + s.value) / kWidth), keys,
                                      static_cast<const T*>(call.values), static_cast<T*>(call.kv)},
               s.rows, int64_t{s.num_heads} * (s.nope + s.value) / kWidth, stream);
    launch_map(
        SharedMap<T, kWidth>{s.num_heads, s.nope, s.rope, keys, static_cast<T*>(call.shared)},
        s.rows, s.rope / kWidth, stream);
  });
}

}  // namespace tessera::cuda
