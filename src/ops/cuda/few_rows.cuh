#pragma once

#include "ops/cuda/vector.cuh"

/// Products of few rows with a matrix that takes longer to read than they to multiply: past the
/// tensor cores, a warp to some of the matrix's rows.
namespace tessera::cuda {

/// Dot products, in F32, of kRows rows with kColumns neighbouring rows of `weight`, all `width`
/// values long, a multiple of eight. Null rows are zeros. To every lane of the warp.
template <int kRows, int kColumns>
__device__ __forceinline__ void multiply_few_rows(const BFloat16* const (&rows)[kRows],
                                                  const BFloat16* weight, int64_t width,
                                                  float (&sums)[kRows][kColumns]) {
  constexpr int kLanes = 32;
  constexpr int kWidth = kVectorWidth<BFloat16>;
#pragma unroll
  for (auto& of_row : sums) {
#pragma unroll
    for (float& sum : of_row) sum = 0;
  }
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
#pragma unroll 4
  for (int64_t i = lane * kWidth; i < width; i += kLanes * kWidth) {
    Pack<BFloat16, kWidth> weights[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) weights[c] = load_pack_once<kWidth>(weight + c * width + i);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (rows[r] == nullptr) continue;
      const Floats<kWidth> values = load<kWidth>(rows[r] + i);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const Floats<kWidth> w = to_floats(weights[c]);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sums[r][c] += values[j] * w[j];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (rows[r] == nullptr) continue;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) sums[r][c] = sum_lanes(sums[r][c]);
  }
}

}  // namespace tessera::cuda
