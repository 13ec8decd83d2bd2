#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tessera::cuda {

/// How many rows of a tensor a kernel works on: all `bound` that memory is planned for, or, where
/// `extent` is not null, `scale` rows for each of the *extent in use, which only the device can
/// read.
struct RowCount {
  int64_t bound = 0;
  const int64_t* extent = nullptr;
  int64_t scale = 1;

#ifdef __CUDACC__
  __device__ __forceinline__ int64_t in_use() const {
    if (extent == nullptr) return bound;
    const int64_t count = *extent * scale;
    return count < bound ? count : bound;
  }
#endif
};

}  // namespace tessera::cuda
