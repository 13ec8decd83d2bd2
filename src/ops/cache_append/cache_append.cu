#include "ops/cache_append/cache_append_kernels.h"
#include "ops/cuda/fail.cuh"
#include "ops/cuda/vector.cuh"

namespace tessera::cuda {
namespace {

template <typename T, int kWidth>
struct AppendMap {
  static constexpr int kUnroll = 2;
  static constexpr int kBlocks = 5;
  using Loaded = Pack<T, kWidth>;

  int64_t num_rows;
  int64_t width;
  int64_t capacity;
  const T* rows;
  const int32_t* start;
  T* cache;

  __device__ Loaded load(int64_t row, uint32_t vector) const {
    return load_pack<kWidth>(rows + row * width + vector * kWidth);
  }
  __device__ void store(int64_t row, uint32_t vector, const Loaded& loaded) const {
    const int64_t first = *start;
    if (first < 0 || first > capacity - num_rows) {
      if (row == 0 && vector == 0) fail("cache_append: the rows do not fit the cache", first);
      return;
    }
    cuda::store(cache + (first + row) * width + vector * kWidth, loaded);
  }
};

}  // namespace

void launch_cache_append(const CacheRows& call, cudaStream_t stream) {
  const bool vectors =
      are_whole_vectors(call.dtype, call.width) && are_aligned(call.rows, call.cache);
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    launch_map(AppendMap<T, kWidth>{call.num_rows, call.width, call.capacity,
                                    static_cast<const T*>(call.rows), call.start,
                                    static_cast<T*>(call.cache)},
               {.bound = call.num_rows}, call.width / kWidth, stream);
  });
}

}  // namespace tessera::cuda
