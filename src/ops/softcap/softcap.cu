#include "ops/cuda/vector.cuh"
#include "ops/softcap/softcap_kernels.h"

namespace tessera::cuda {
namespace {

template <typename T, int kWidth>
struct SoftcapMap {
  static constexpr int kUnroll = 2;
  static constexpr int kBlocks = 6;
  using Loaded = Pack<T, kWidth>;

  int64_t width;
  float cap;
  const T* x;
  T* y;

  __device__ Loaded load(int64_t row, uint32_t vector) const {
    return load_pack<kWidth>(x + row * width + vector * kWidth);
  }
  __device__ void store(int64_t row, uint32_t vector, const Loaded& loaded) const {
    Floats<kWidth> value = to_floats(loaded);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) value[i] = cap * tanhf(value[i] / cap);
    cuda::store(y + row * width + vector * kWidth, value);
  }
};

}  // namespace

void launch_softcap(const SoftcapRows& call, cudaStream_t stream) {
  const bool vectors = are_whole_vectors(call.dtype, call.width) && are_aligned(call.x, call.y);
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    launch_map(SoftcapMap<T, kWidth>{call.width, call.cap, static_cast<const T*>(call.x),
                                     static_cast<T*>(call.y)},
               call.rows, call.width / kWidth, stream);
  });
}

}  // namespace tessera::cuda
