#include "ops/cuda/vector.cuh"
#include "ops/scale/scale_kernels.h"

namespace tessera::cuda {
namespace {

template <typename T, int kWidth, bool kAddend>
struct ScaleMap {
  static constexpr int kUnroll = 2;
  static constexpr int kBlocks = 6;
  struct Loaded {
    Pack<T, kWidth> x;
    Pack<T, kWidth> addend;
  };

  int64_t width;
  float factor;
  const T* x;
  const T* addend;
  T* y;

  __device__ Loaded load(int64_t row, uint32_t vector) const {
    const int64_t at = row * width + vector * kWidth;
    Loaded loaded{};
    loaded.x = load_pack<kWidth>(x + at);
    if constexpr (kAddend) loaded.addend = load_pack<kWidth>(addend + at);
    return loaded;
  }
  __device__ void store(int64_t row, uint32_t vector, const Loaded& loaded) const {
    Floats<kWidth> value = to_floats(loaded.x);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) value[i] *= factor;
    if constexpr (kAddend) {
      const Floats<kWidth> other = to_floats(loaded.addend);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) value[i] += other[i];
    }
    cuda::store(y + row * width + vector * kWidth, value);
  }
};

template <typename T, int kWidth, bool kAddend>
void launch_scale_map(const ScaleRows& call, cudaStream_t stream) {
  launch_map(
      ScaleMap<T, kWidth, kAddend>{call.width, call.factor, static_cast<const T*>(call.x),
                                   static_cast<const T*>(call.addend), static_cast<T*>(call.y)},
      call.rows, call.width / kWidth, stream);
}

}  // namespace

void launch_scale(const ScaleRows& call, cudaStream_t stream) {
  const bool with_addend = call.addend != nullptr;
  const bool vectors = are_whole_vectors(call.dtype, call.width) && are_aligned(call.x, call.y) &&
                       (!with_addend || are_aligned(call.addend));
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    if (with_addend) {
      launch_scale_map<T, kWidth, true>(call, stream);
    } else {
      launch_scale_map<T, kWidth, false>(call, stream);
    }
  });
}

}  // namespace tessera::cuda
