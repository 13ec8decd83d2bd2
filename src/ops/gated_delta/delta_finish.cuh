#pragma once

#include "ops/cuda/pipeline/warp_roles.cuh"
#include "ops/gated_delta/delta_tiles.cuh"

/// What the last step of the backward pass has in shared memory, and its plainer parts.
namespace tessera::cuda {

constexpr int kWarps = kWarpgroup / 32;
constexpr int kSlice = kTileColumns;            // values that are multiplied at once
constexpr int kFinishWorkers = 3 * kWarpgroup;  // threads that multiply

/// What rows of a chunk add to gradients of G and beta, in parts that are summed in order.
struct FinishSums {
  float of_rows[2][kDeltaRows];              // of factors exp(G_i - G_j), by rows of P and A
  float of_columns[2 * kWarps][kDeltaRows];  // the same by columns
  float of_beta[kDeltaRows];                 // by rows of A
  float reads_q[kDeltaRows];                 // of q's gradients through the state before, times q
  float reads_k[kDeltaRows];                 // the same of k, without beta
  float writes_k[kDeltaRows];                // of k's through the state behind, times k
  float of_value[kDeltaRows];                // of beta, by v
  float of_kept[kWarps];
};

/// 64 columns of what depends on values.
template <int kKeySize>
struct FinishSlice {
  TiledMatrix<kDeltaRows, kSlice> grad_o;
  TiledMatrix<kDeltaRows, kSlice> of_right;
  TiledMatrix<kDeltaRows, kSlice> written;
  TiledMatrix<kDeltaRows, kSlice> v;
  TiledMatrix<kKeySize, kSlice> state;
  TiledMatrix<kKeySize, kSlice> state_grad;
};

template <int kKeySize>
struct FinishShared {
  using Keys = TiledMatrix<kDeltaRows, kKeySize>;
  FinishSlice<kKeySize> slices[2];
  Keys q[2];  // of a chunk's key head and the next
  Keys k[2];
  TiledMatrix<kDeltaRows, kDeltaRows> squares[2];  // gradients of P and of A
  DeltaFactors c[4];  // of value heads; a head's are read when slices of the next two may arrive
  FinishSums sums;
  Barrier full[2];
  Barrier empty[2];
  Barrier keys_full[2];
  Barrier keys_empty[2];

  __device__ __forceinline__ void init() {
    for (int i = 0; i < 2; ++i) {
      full[i].init(kWarpgroup);
      keys_full[i].init(kWarpgroup);
      empty[i].init(kFinishWorkers);
      keys_empty[i].init(kFinishWorkers);
    }
    fence_barrier_init();
  }
  /// In place of the squares: 64 columns of a warpgroup's sums, on their way to another.
  __device__ __forceinline__ float* passed() { return reinterpret_cast<float*>(squares); }
};

/// The sum over the four lanes that have a row's columns.
__device__ __forceinline__ float sum_row_lanes(float x) {
  return sum_lanes<4>(x);
}
/// The sum over the eight lanes that have a column's rows.
__device__ __forceinline__ float sum_column_lanes(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(0xFFFFFFFF, x, step);
  return x;
}

/// A block's way through value heads, key heads and chunks.
struct FinishStep {
  int task;    ///< a key head of a chunk
  int member;  ///< which of the value heads that read it
  int tasks;   ///< how many were before, of this block
  int heads;   ///< how many value heads

  __device__ __forceinline__ FastPlace place(const DeltaOperands& x, int group) const {
    return {x, task / x.key_heads, task % x.key_heads * group + member};
  }
  __device__ __forceinline__ FinishStep next(int group) const {
    return member + 1 < group
               ? FinishStep{task, member + 1, tasks, heads + 1}
               : FinishStep{task + static_cast<int>(gridDim.x), 0, tasks + 1, heads + 1};
  }
};

/// A thread's part of sums that need no products: of a row of v, and of the state that is kept.
template <int kKeySize>
struct FinishPlainSums {
  float of_value = 0;
  float of_kept = 0;

  static __device__ __forceinline__ int thread() {
    return static_cast<int>(threadIdx.x) % kWarpgroup;
  }
  static __device__ __forceinline__ void add_dot(float& sum, const BFloat16* a, const BFloat16* b) {
    const Floats<8> of_a = cuda::load<8>(a);
    const Floats<8> of_b = cuda::load<8>(b);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += of_a[i] * of_b[i];
  }
  /// Two threads share a row.
  __device__ __forceinline__ void add(const FinishSlice<kKeySize>& slice) {
#pragma unroll
    for (int i = 0; i < kSlice / 2; i += 8) {
      const int column = thread() % 2 * (kSlice / 2) + i;
      add_dot(of_value, slice.v.at(thread() / 2, column), slice.of_right.at(thread() / 2, column));
    }
#pragma unroll 4
    for (int i = thread() * 8; i < kKeySize * kSlice; i += kWarpgroup * 8)
      add_dot(of_kept, slice.state.values + i, slice.state_grad.values + i);
  }
  __device__ __forceinline__ void leave(FinishSums& sums) const {
    const float value = sum_lanes<2>(of_value);
    const float kept = sum_lanes(of_kept);
    if (thread() % 2 == 0) sums.of_value[thread() / 2] = value;
    if (thread() % 32 == 0) sums.of_kept[thread() / 32] = kept;
  }
};

/// A thread's sums of the value heads before, on their way through the L2 cache.
template <int kKeySize>
struct FinishTotals {
  static constexpr int kFours = kKeySize / 8;
  float4* own;
  float4 earlier[kFours];

  __device__ __forceinline__ FinishTotals(float* totals, int role, bool has_earlier)
      : own(reinterpret_cast<float4*>(totals) +
            (static_cast<int64_t>(blockIdx.x) * 3 + role) * kFours * kWarpgroup +
            threadIdx.x % kWarpgroup) {
#pragma unroll
    for (int i = 0; i < kFours; ++i)
      earlier[i] = has_earlier ? own[i * kWarpgroup] : float4{0, 0, 0, 0};
  }
  /// Adds them, and keeps the sum for the next value head.
  __device__ __forceinline__ void add_to(GroupTile<kKeySize>& tile, bool has_next) const {
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      float* four = tile.sums + 4 * i;
      four[0] += earlier[i].x;
      four[1] += earlier[i].y;
      four[2] += earlier[i].z;
      four[3] += earlier[i].w;
      if (has_next) own[i * kWarpgroup] = {four[0], four[1], four[2], four[3]};
    }
  }
};

}  // namespace tessera::cuda
