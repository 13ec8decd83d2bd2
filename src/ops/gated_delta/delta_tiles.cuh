#pragma once

#include "ops/cuda/ptx/bulk_copy.cuh"
#include "ops/cuda/ptx/warpgroup_product.cuh"
#include "ops/cuda/tile/row_quads.cuh"
#include "ops/gated_delta/delta_fast.cuh"

/// Matrices of BF16 in shared memory as wgmma reads them, and a warpgroup's sums.
namespace tessera::cuda {

constexpr int kTileColumns = 64;

/// [kRows, kColumns]: tiles of 64 columns, one behind the other, whose rows of 128 bytes are
/// swizzled (describe_tile).
template <int kRows, int kColumns>
struct TiledMatrix {
  static constexpr int kTile = kRows * kTileColumns;
  static_assert(kColumns % kTileColumns == 0 && kRows % 8 == 0);

  alignas(1024) BFloat16 values[kRows * kColumns];

  static __device__ __forceinline__ int place(int row, int column) {
    return column / kTileColumns * kTile + row * kTileColumns +
           (column % kTileColumns ^ row % 8 * 8);
  }
  __device__ __forceinline__ BFloat16* at(int row, int column) {
    return values + place(row, column);
  }
  __device__ __forceinline__ const BFloat16* at(int row, int column) const {
    return values + place(row, column);
  }

  /// Starts to copy the first `rows` rows, with zeros behind them, by kThreads threads.
  template <int kThreads>
  __device__ __forceinline__ void copy_from(const BFloat16* from, int64_t stride, int rows) {
    constexpr int kVectors = kColumns / 8;  // of a row
#pragma unroll 4
    for (int i = 0; i < kRows * kVectors; i += kThreads) {
      const int vector = i + static_cast<int>(threadIdx.x);
      if (kRows * kVectors % kThreads != 0 && vector >= kRows * kVectors) break;
      const int row = vector / kVectors;
      const int column = vector % kVectors * 8;
      const bool there = row < rows;
      copy_async_or_zero(at(row, column), there ? from + row * stride + column : from, there);
    }
  }
};

/// An operand of products: [rows of the product, reduction] where the major is kReduction, else
/// [reduction, rows]; `first` rows of the product, a multiple of 64, stand before it.
template <TileMajor kMajor, int kRows, int kColumns>
struct TiledOperand {
  static constexpr TileMajor kTileMajor = kMajor;
  const TiledMatrix<kRows, kColumns>& matrix;
  int first = 0;

  /// 16 of the reduction from k on.
  __device__ __forceinline__ uint64_t describe(int k) const {
    constexpr int kTile = TiledMatrix<kRows, kColumns>::kTile;
    if constexpr (kMajor == TileMajor::kOther) {
      const BFloat16* tile = matrix.values + first / kTileColumns * kTile;
      return describe_tile<kMajor>(tile, kTile * sizeof(BFloat16)) +
             k / 16 * kNextReduction<kMajor>;
    } else {
      const BFloat16* tile = matrix.values + k / kTileColumns * kTile + first * kTileColumns;
      return describe_tile<kMajor>(tile, 0) + k % kTileColumns / 16 * kNextReduction<kMajor>;
    }
  }
};

template <int kRows, int kColumns>
__device__ __forceinline__ TiledOperand<TileMajor::kReduction, kRows, kColumns> along(
    const TiledMatrix<kRows, kColumns>& matrix, int first = 0) {
  return {matrix, first};
}
template <int kRows, int kColumns>
__device__ __forceinline__ TiledOperand<TileMajor::kOther, kRows, kColumns> across(
    const TiledMatrix<kRows, kColumns>& matrix, int first = 0) {
  return {matrix, first};
}

/// A warpgroup's sums [64, kColumns]; rows in halves: h is 0 or 1.
template <int kColumns>
struct GroupTile {
  float sums[kColumns / 2] = {};

  /// Adds a b over kDepth of the reduction, between begin() and end() of all tiles that take part.
  template <int kDepth, typename A, typename B>
  __device__ __forceinline__ void add(const A& a, const B& b) {
#pragma unroll
    for (int k = 0; k < kDepth; k += 16)
      WarpgroupProduct<kColumns, A::kTileMajor, B::kTileMajor>::run(sums, a.describe(k),
                                                                    b.describe(k), true);
  }

  static __device__ __forceinline__ int row(int h) {
    return static_cast<int>(threadIdx.x) / 32 % 4 * 16 + 8 * h +
           static_cast<int>(threadIdx.x) % 32 / 4;
  }
  /// The first of two columns.
  static __device__ __forceinline__ int column(int j) {
    return 8 * j + static_cast<int>(threadIdx.x) % 4 * 2;
  }
  /// Where a thread's pairs lie in a TiledMatrix of kRows rows. Made anew where it is used: what
  /// loops would keep of it for many pairs takes more registers than it saves instructions.
  template <int kRows>
  struct Place {
    int first = row(0) * kTileColumns + column(0);
    int turn = row(0) % 8 * 8;

    __device__ __forceinline__ Place() { asm volatile("" : "+r"(first), "+r"(turn)); }
    __device__ __forceinline__ int at(int h, int j) const {
      return j / 8 * (kRows * kTileColumns) + h * (8 * kTileColumns) + first + (j % 8 * 8 ^ turn);
    }
  };

  /// Calls take(h, j, first, second) for the pairs of neighbours, row by row.
  template <typename Take>
  __device__ __forceinline__ void for_each_pair(Take take) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j)
        take(h, j, sums[4 * j + 2 * h], sums[4 * j + 2 * h + 1]);
    }
  }
  /// Rounded, into the columns of a matrix from `first` on.
  template <int kWidth>
  __device__ __forceinline__ void round_to(TiledMatrix<64, kWidth>& to, int first = 0) {
    const Place<64> place;
    for_each_pair([&](int h, int j, float a, float b) {
      store_pair(to.values + place.at(h, first / 8 + j), a, b);
    });
  }
  /// The first `rows` rows, rounded, to global memory, in vectors of 16 bytes.
  __device__ __forceinline__ void write(BFloat16* to, int64_t stride, int rows) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int four = 0; four < kColumns / 32; ++four) {
        const uint4 line = turn_quads(pack_tiles(sums + 16 * four, h));
        const int at = 32 * four + static_cast<int>(threadIdx.x) % 4 * 8;
        if (row(h) < rows) *reinterpret_cast<uint4*>(to + row(h) * stride + at) = line;
      }
    }
  }
};

/// Before products are added to the tiles.
template <int... kColumns>
__device__ __forceinline__ void begin(GroupTile<kColumns>&... tiles) {
  (fence_values(tiles.sums), ...);
  begin_products();
}
/// Waits for them.
template <int... kColumns>
__device__ __forceinline__ void end(GroupTile<kColumns>&... tiles) {
  commit_products();
  wait_products<0>();
  (fence_values(tiles.sums), ...);
}

}  // namespace tessera::cuda
