#pragma once

/// Factors of the columns and rows of what a warpgroup has multiplied (WarpgroupProduct).
namespace tessera::cuda {

/// A warp has the factors of all columns, each once: lane l those of columns 8 j + 2 (l % 4) + i
/// for j = l / 4 + 8 m, as at[m][i].
template <int kColumns>
struct ColumnFactors {
  float at[(kColumns + 63) / 64][2];

  /// Of which there are `num_columns`, from `from` on; the others are 0.
  __device__ __forceinline__ void load(const float* from, int num_columns) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int m = 0; m < (kColumns + 63) / 64; ++m) {
      const int column = 8 * (lane / 4 + 8 * m) + 2 * (lane % 4);
#pragma unroll
      for (int i = 0; i < 2; ++i) at[m][i] = column + i < num_columns ? from[column + i] : 0.0F;
    }
  }
};

/// Of this thread's two rows of 64.
struct RowFactors {
  float at[2];

  /// Of which there are `num_rows`, from `from` on; the others are 0.
  __device__ __forceinline__ void load(const float* from, int num_rows) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = 16 * warp + 8 * h + lane / 4;
      at[h] = row < num_rows ? from[row] : 0.0F;
    }
  }
};

/// d[row][column] *= rows[row] · columns[column]; by all threads of a warp.
template <int kColumns, int kMaxColumns>
__device__ __forceinline__ void scale_products(float (&d)[kColumns / 2],
                                               const ColumnFactors<kMaxColumns>& columns,
                                               const RowFactors& rows) {
  static_assert(kColumns <= kMaxColumns);
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float column = __shfl_sync(~0U, columns.at[j / 8][i], j % 8 * 4 + lane % 4);
#pragma unroll
      for (int h = 0; h < 2; ++h) d[4 * j + 2 * h + i] *= column * rows.at[h];
    }
  }
}

}  // namespace tessera::cuda
