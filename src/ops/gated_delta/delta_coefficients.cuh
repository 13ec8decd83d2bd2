#pragma once

#include "ops/gated_delta/gated_delta_kernels.h"

namespace tessera::cuda {

/// A chunk's factors in shared memory.
struct DeltaCoefficients : DeltaFactors {
  /// By all threads, of which there are kDeltaRows or more; ends with a barrier.
  __device__ __forceinline__ void load(const DeltaOperands& x, const DeltaMarks& marks, int chunk,
                                       int head) {
    const int first = chunk * kDeltaRows;
    const int rows = min(kDeltaRows, x.tokens - first);
    const int i = static_cast<int>(threadIdx.x);
    if (i < kDeltaRows) {
      const bool there = i < rows;
      const int64_t token = first + (there ? i : 0);
      const int64_t key_at = token * x.key_heads + x.key_head(head);
      sums[i] = there ? marks.sums[token * x.heads + head] : 0;
      starts[i] = there ? marks.starts[token] : INT32_MAX;
      beta[i] = there ? x.beta[token * x.heads + head] : 0;
      q_inverse[i] = there ? marks.q_inverse[key_at] * query_scale(x.key_size) : 0;
      k_inverse[i] = there ? marks.k_inverse[key_at] : 0;
    }
    __syncthreads();
    derive(i, first, rows);
    __syncthreads();
  }

  /// The others of row i. REQUIRES sums and starts of all `rows`, of which `first` is the token.
  __device__ __forceinline__ void derive(int i, int first, int rows) {
    if (i >= kDeltaRows) return;
    const bool there = i < rows;
    const int last = rows - 1;
    reads[i] = there && starts[i] < first ? expf(sums[i]) : 0;
    writes[i] = there && starts[i] == starts[last] ? expf(sums[last] - sums[i]) : 0;
    if (i != 0) return;
    kept = starts[last] < first ? expf(sums[last]) : 0;
    count = rows;
  }

  /// exp(G_i - G_j) for j <= i of one sequence, else 0.
  __device__ __forceinline__ float between(int i, int j) const {
    return joins(i, j) ? expf(sums[i] - sums[j]) : 0;
  }
  static __device__ __forceinline__ float query_scale(int key_size) {
    return 1.0F / sqrtf(static_cast<float>(key_size));
  }

 private:
  __device__ __forceinline__ bool joins(int i, int j) const {
    return j <= i && i < count && starts[i] == starts[j];
  }
};

}  // namespace tessera::cuda
