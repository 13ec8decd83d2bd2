#include "ops/add_bias/add_bias_kernels.h"
#include "ops/cuda/vector.cuh"

namespace tessera::cuda {
namespace {

template <typename T, int kWidth>
struct AddBiasMap {
  static constexpr int kUnroll = 1;
  static constexpr int kBlocks = 8;
  struct Loaded {
    Pack<T, kWidth> x;
    Pack<float, kWidth> bias;
  };

  int64_t width;
  const T* x;
  const float* bias;
  T* y;

  __device__ Loaded load(int64_t row, uint32_t vector) const {
    return {load_pack<kWidth>(x + row * width + vector * kWidth),
            load_pack<kWidth>(bias + vector * kWidth)};
  }
  __device__ void store(int64_t row, uint32_t vector, const Loaded& loaded) const {
    Floats<kWidth> total = to_floats(loaded.x);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) total[i] += loaded.bias.at[i];
    cuda::store(y + row * width + vector * kWidth, total);
  }
};

}  // namespace

void launch_add_bias(const AddBiasRows& call, cudaStream_t stream) {
  const bool vectors =
      are_whole_vectors(call.dtype, call.width) && are_aligned(call.x, call.bias, call.y);
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    launch_map(AddBiasMap<T, kWidth>{call.width, static_cast<const T*>(call.x), call.bias,
                                     static_cast<T*>(call.y)},
               call.rows, call.width / kWidth, stream);
  });
}

}  // namespace tessera::cuda
