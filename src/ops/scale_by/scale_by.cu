#include "ops/cuda/vector.cuh"
#include "ops/scale_by/scale_by_kernels.h"

namespace tessera::cuda {
namespace {

template <typename T, int kWidth>
struct ScaleByMap {
  static constexpr int kUnroll = 2;
  static constexpr int kBlocks = 6;
  struct Loaded {
    Pack<T, kWidth> x;
    float factor;
  };

  int64_t width;
  const float* factor;
  const T* x;
  T* y;

  __device__ Loaded load(int64_t row, uint32_t vector) const {
    return {load_pack<kWidth>(x + row * width + vector * kWidth), *factor};
  }
  __device__ void store(int64_t row, uint32_t vector, const Loaded& loaded) const {
    Floats<kWidth> value = to_floats(loaded.x);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) value[i] *= loaded.factor;
    cuda::store(y + row * width + vector * kWidth, value);
  }
};

}  // namespace

void launch_scale_by(const ScaledByRows& call, cudaStream_t stream) {
  const bool vectors = are_whole_vectors(call.dtype, call.width) && are_aligned(call.x, call.y);
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    launch_map(ScaleByMap<T, kWidth>{call.width, call.factor, static_cast<const T*>(call.x),
                                     static_cast<T*>(call.y)},
               call.rows, call.width / kWidth, stream);
  });
}

}  // namespace tessera::cuda
