#pragma once

#include "ops/cuda/vector.cuh"

namespace tessera::cuda {

/// Writes a block's sums of columns: thread `group · lanes + lane` has those of vector `lane`, and
/// the groups are added in order. `shared` has room for kWidth floats of every thread. All threads
/// must call; `to` is where the block's first column goes, `cols` how many it has.
template <int kWidth>
__device__ __forceinline__ void write_block_sums(float* to, int cols, const Floats<kWidth>& sums,
                                                 int lanes, float* shared) {
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWidth; ++i) shared[threadIdx.x * kWidth + i] = sums[i];
  __syncthreads();
  const int group_floats = lanes * kWidth;
  const int end = static_cast<int>(blockDim.x) * kWidth;
  for (int column = static_cast<int>(threadIdx.x); column < cols; column += blockDim.x) {
    float total = 0;
    for (int at = column; at < end; at += group_floats) total += shared[at];
    to[column] = total;
  }
}

}  // namespace tessera::cuda
