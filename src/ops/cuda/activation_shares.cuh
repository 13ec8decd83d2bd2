#pragma once

#include <algorithm>

#include "ops/cuda/activation_rows.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/vector.cuh"

/// How rows of activations and of their gradients are shared out. Where all rows have one size and
/// nothing is summed up over a row, every thread takes a vector. Otherwise some of a block's warps
/// share a row, and each of their threads takes a vector at a time too: that leaves registers for
/// enough threads to keep the memory busy.
namespace tessera::cuda::activation {

constexpr int kShareWarps = 8;  // of a block, at most
constexpr int kShareThreads = 32 * kShareWarps;
constexpr int kShareBlocks = 5;  // of an SM

/// The gate columns of a row.
__device__ __forceinline__ int size_of(int64_t row, int size, const SizedExperts& experts) {
  if (experts.count == 0) return size;
  int low = 0;
  int high = experts.count - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (experts.offsets[middle + 1] <= row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return experts.sizes[low];
}

/// What a warp takes: of its row each `warps`-th piece of 32 vectors, the first one with number
/// `piece`.
struct Share {
  int64_t row;
  int piece;
  int warps;

  __device__ __forceinline__ explicit Share(int row_warps) : warps(row_warps) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int block_rows = static_cast<int>(blockDim.x) / 32 / warps;
    row = static_cast<int64_t>(blockIdx.x) * block_rows + warp / warps;
    piece = warp % warps;
  }
  /// Calls use(column) for the first column of each of the thread's vectors.
  template <int kWidth, typename Use>
  __device__ __forceinline__ void for_columns(int size, Use use) const {
    constexpr int kPiece = 32 * kWidth;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int column = piece * kPiece + lane * kWidth; column < size; column += warps * kPiece)
      use(column);
  }
};

inline bool has_whole_vectors(const ActivationRows& call, const SizedExperts& experts) {
  const bool equal = are_whole_vectors(call.dtype, call.size, call.in_width, call.out_width);
  return equal && std::all_of(experts.sizes, experts.sizes + experts.count,
                              [&](int size) { return are_whole_vectors(call.dtype, size); });
}

/// The launch of a kernel whose warps share rows.
struct RowLaunch {
  int row_warps;
  unsigned blocks;
  unsigned threads;

  RowLaunch(const ActivationRows& call, int width)
      : row_warps(static_cast<int>(
            std::clamp<int64_t>(divide_up(call.size, 32 * width), 1, kShareWarps))) {
    const int block_rows = kShareWarps / row_warps;
    blocks = static_cast<unsigned>(divide_up(call.rows.bound, block_rows));
    threads = static_cast<unsigned>(32 * row_warps * block_rows);
  }
};

}  // namespace tessera::cuda::activation
