#include "ops/add/add_kernels.h"
#include "ops/cuda/vector.cuh"

namespace tessera::cuda {
namespace {

template <typename T, int kWidth>
struct AddMap {
  static constexpr int kUnroll = 2;
  static constexpr int kBlocks = 6;
  struct Loaded {
    Pack<T, kWidth> a;
    Pack<T, kWidth> b;
  };

  int64_t width;
  const T* a;
  const T* b;
  T* sum;

  __device__ Loaded load(int64_t row, uint32_t vector) const {
    const int64_t at = row * width + vector * kWidth;
    return {load_pack<kWidth>(a + at), load_pack<kWidth>(b + at)};
  }
  __device__ void store(int64_t row, uint32_t vector, const Loaded& loaded) const {
    Floats<kWidth> total = to_floats(loaded.a);
    const Floats<kWidth> other = to_floats(loaded.b);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) total[i] += other[i];
    cuda::store(sum + row * width + vector * kWidth, total);
  }
};

}  // namespace

void launch_add(const AddRows& call, cudaStream_t stream) {
  const bool vectors =
      are_whole_vectors(call.dtype, call.width) && are_aligned(call.a, call.b, call.sum);
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    launch_map(AddMap<T, kWidth>{call.width, static_cast<const T*>(call.a),
                                 static_cast<const T*>(call.b), static_cast<T*>(call.sum)},
               call.rows, call.width / kWidth, stream);
  });
}

}  // namespace tessera::cuda
