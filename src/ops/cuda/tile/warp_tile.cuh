#pragma once

#include "ops/cuda/ptx/fragment_product.cuh"

/// Products of BF16 matrices that lie whole in shared memory, each warp its own tile: for kernels
/// whose steps hand small matrices to each other.
namespace tessera::cuda {

/// Rows that are `stride` values apart; that is a multiple of 8 with rest 8 of 64, so that rows
/// begin in different banks, and addresses are multiples of 16 bytes.
struct SharedMatrix {
  const __nv_bfloat16* data;
  int stride;
};

/// A warp's sums of kRows (a multiple of 16) by kColumns (of 16).
template <int kRows, int kColumns>
struct WarpTile {
  static constexpr int kRowParts = kRows / 16;
  static constexpr int kColumnParts = kColumns / 8;

  float sums[kRowParts][kColumnParts][4] = {};

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kRowParts; ++i) {
#pragma unroll
      for (int j = 0; j < kColumnParts; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[i][j][e] = 0;
      }
    }
  }

  /// Adds a's rows from `row` on times b's columns from `column` on. Operands are [rows or columns,
  /// reduction], or, where the reduction is not contiguous, [reduction, rows or columns].
  template <bool kAReduction, bool kBReduction, int kDepth>
  __device__ __forceinline__ void add(const SharedMatrix& a, int row, const SharedMatrix& b,
                                      int column) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int line = lane % 8;
    const int second = lane / 8 % 2 * 8;  // of each of a's pairs of rows, of b's of the reduction
    const int third = lane / 16 * 8;      // the other way round
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      uint32_t of_a[kRowParts][4];
#pragma unroll
      for (int i = 0; i < kRowParts; ++i) {
        const int first = row + i * 16 + second;
        load_fragment<!kAReduction>(of_a[i],
                                    a.data + (kAReduction ? (first + line) * a.stride + k + third
                                                          : (k + third + line) * a.stride + first));
      }
#pragma unroll
      for (int j = 0; j < kColumnParts; j += 2) {
        const int first = column + j * 8 + third;
        uint32_t of_b[4];
        load_fragment<!kBReduction>(
            of_b, b.data + (kBReduction ? (first + line) * b.stride + k + second
                                        : (k + second + line) * b.stride + first));
#pragma unroll
        for (int i = 0; i < kRowParts; ++i) {
          fragment_product(sums[i][j], of_a[i], of_b[0], of_b[1]);
          fragment_product(sums[i][j + 1], of_a[i], of_b[2], of_b[3]);
        }
      }
    }
  }

  /// Row of a thread's sums in part r of eight rows, and the first of two columns in part p of
  /// eight.
  static __device__ __forceinline__ int row_of(int r) {
    return r * 8 + static_cast<int>(threadIdx.x) % 32 / 4;
  }
  static __device__ __forceinline__ int column_of(int p) {
    return p * 8 + static_cast<int>(threadIdx.x) % 4 * 2;
  }

  /// Calls take(r, p, first, second) for each pair of neighbouring sums, which it may change.
  template <typename Take>
  __device__ __forceinline__ void for_each_part(Take take) {
#pragma unroll
    for (int r = 0; r < kRows / 8; ++r) {
#pragma unroll
      for (int p = 0; p < kColumnParts; ++p)
        take(r, p, sums[r / 2][p][r % 2 * 2], sums[r / 2][p][r % 2 * 2 + 1]);
    }
  }
  /// Multiplies rows by factor(row of the tile).
  template <typename Factor>
  __device__ __forceinline__ void scale_rows(Factor factor) {
#pragma unroll
    for (int r = 0; r < kRows / 8; ++r) {
      const float scale = factor(row_of(r));
#pragma unroll
      for (int p = 0; p < kColumnParts; ++p) {
        sums[r / 2][p][r % 2 * 2] *= scale;
        sums[r / 2][p][r % 2 * 2 + 1] *= scale;
      }
    }
  }
  /// As for_each_part, by the tile's rows and columns.
  template <typename Take>
  __device__ __forceinline__ void for_each_pair(Take take) {
    for_each_part([&](int r, int p, float& first, float& second) {
      take(row_of(r), column_of(p), first, second);
    });
  }
};

/// Calls take(r, p, pair of a, pair of b) for the pairs of two tiles alike.
template <int kRows, int kColumns, typename Take>
__device__ __forceinline__ void combine_parts(const WarpTile<kRows, kColumns>& a,
                                              const WarpTile<kRows, kColumns>& b, Take take) {
#pragma unroll
  for (int r = 0; r < kRows / 8; ++r) {
#pragma unroll
    for (int p = 0; p < kColumns / 8; ++p) {
      const float* of_a = a.sums[r / 2][p] + r % 2 * 2;
      const float* of_b = b.sums[r / 2][p] + r % 2 * 2;
      take(r, p, float2{of_a[0], of_a[1]}, float2{of_b[0], of_b[1]});
    }
  }
}

__device__ __forceinline__ void store_pair(__nv_bfloat16* to, float first, float second) {
  *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(first, second);
}
__device__ __forceinline__ float2 load_pair(const __nv_bfloat16* from) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(from));
}

}  // namespace tessera::cuda
