#pragma once

#include "ops/gated_delta/delta_exact.cuh"
#include "ops/kda/kda_kernels.h"

namespace tessera::cuda {

/// A chunk's rows of a head, with those of F32 [T, N, Dk].
template <typename T>
struct KdaPlace : DeltaPlace<T> {
  using DeltaPlace<T>::x;
  using DeltaPlace<T>::chunk;
  using DeltaPlace<T>::head;

  __device__ int count() const { return min(kDeltaRows, x.tokens - chunk * kDeltaRows); }
  __device__ int64_t key_at() const { return x.key_at(this->token(), head); }
  __device__ int64_t kept_at() const {
    return (static_cast<int64_t>(chunk) * x.heads + head) * x.key_size;
  }
  __device__ float beta(int i) const { return x.beta[(this->token() + i) * x.heads + head]; }
  /// A row of what each token has for its key heads or heads [T, N].
  __device__ float of_row(const float* values, int i) const {
    return values[(this->token() + i) * x.heads + head];
  }
  __device__ int start(const DeltaMarks& marks, int i) const {
    return marks.starts[this->token() + i];
  }
};

__device__ __forceinline__ float kda_query_scale(const DeltaOperands& x) {
  return 1.0F / sqrtf(static_cast<float>(x.key_size));
}

}  // namespace tessera::cuda
