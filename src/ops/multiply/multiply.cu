#include "ops/cuda/vector.cuh"
#include "ops/multiply/multiply_kernels.h"

namespace tessera::cuda {
namespace {

template <typename T, int kWidth>
struct MultiplyMap {
  static constexpr int kUnroll = 2;
  static constexpr int kBlocks = 6;
  struct Loaded {
    Pack<T, kWidth> a;
    Pack<T, kWidth> b;
  };

  int64_t width;
  const T* a;
  const T* b;
  T* y;

  __device__ Loaded load(int64_t row, uint32_t vector) const {
    const int64_t at = row * width + vector * kWidth;
    return {load_pack<kWidth>(a + at), load_pack<kWidth>(b + at)};
  }
  __device__ void store(int64_t row, uint32_t vector, const Loaded& loaded) const {
    Floats<kWidth> value = to_floats(loaded.a);
    const Floats<kWidth> other = to_floats(loaded.b);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) value[i] *= other[i];
    cuda::store(y + row * width + vector * kWidth, value);
  }
};

}  // namespace

void launch_multiply(const MultiplyRows& call, cudaStream_t stream) {
  const bool vectors =
      are_whole_vectors(call.dtype, call.width) && are_aligned(call.a, call.b, call.y);
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    launch_map(MultiplyMap<T, kWidth>{call.width, static_cast<const T*>(call.a),
                                      static_cast<const T*>(call.b), static_cast<T*>(call.y)},
               call.rows, call.width / kWidth, stream);
  });
}

}  // namespace tessera::cuda
