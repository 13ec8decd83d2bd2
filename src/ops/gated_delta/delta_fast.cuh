#pragma once

#include "ops/cuda/ptx/async_copy.cuh"
#include "ops/cuda/ptx/fast_exp.cuh"
#include "ops/cuda/tile/warp_tile.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/gated_delta/delta_coefficients.cuh"

/// What the kernels for BF16 and heads of 64 and 128 share. Operands of products are q, k, v and
/// gradients of o as they are given: the lengths of q and k, decays and strengths are factors of
/// rows of what products give, in F32.
namespace tessera::cuda {

constexpr int kFastPadding = 8;  // of rows in shared memory
constexpr int kSquareStride = kDeltaRows + kFastPadding;

/// A thread's vectors of kRows by kColumns, of which rows in shared memory are padded: all in one
/// column, kStep rows apart.
template <int kRows, int kColumns, int kThreads>
struct RowVectors {
  static constexpr int kVectors = kColumns / 8;
  static constexpr int kStep = kThreads / kVectors;
  static constexpr int kStride = kColumns + kFastPadding;
  static_assert(kThreads % kVectors == 0 && kRows % kStep == 0);

  int row = static_cast<int>(threadIdx.x) / kVectors;
  int column = static_cast<int>(threadIdx.x) % kVectors * 8;
};

/// Starts to copy the first `rows` rows of kRows by kColumns to shared memory, with zeros behind.
template <int kRows, int kColumns, int kThreads>
__device__ __forceinline__ void copy_rows(BFloat16* to, const BFloat16* from, int64_t stride,
                                          int rows) {
  using Vectors = RowVectors<kRows, kColumns, kThreads>;
  const Vectors own;
  to += own.row * Vectors::kStride + own.column;
  const BFloat16* source = from + own.row * stride + own.column;
#pragma unroll
  for (int row = 0; row < kRows; row += Vectors::kStep) {
    const bool there = own.row + row < rows;
    copy_async_or_zero(to + row * Vectors::kStride, there ? source : from, there);
    source += Vectors::kStep * stride;
  }
}

/// Rows in shared memory to global memory.
template <int kRows, int kColumns, int kThreads>
__device__ __forceinline__ void write_rows(BFloat16* to, int64_t stride, const BFloat16* from) {
  using Vectors = RowVectors<kRows, kColumns, kThreads>;
  const Vectors own;
  to += own.row * stride + own.column;
  from += own.row * Vectors::kStride + own.column;
#pragma unroll
  for (int row = 0; row < kRows; row += Vectors::kStep) {
    store(to, load_pack<8>(from + row * Vectors::kStride));
    to += Vectors::kStep * stride;
  }
}

__device__ __forceinline__ void copy_factors(DeltaFactors* to, const DeltaFactors* from) {
  static_assert(sizeof(DeltaFactors) % 16 == 0);
  const int i = static_cast<int>(threadIdx.x);
  if (i < static_cast<int>(sizeof(DeltaFactors) / 16))
    copy_async_or_zero(reinterpret_cast<uint4*>(to) + i, reinterpret_cast<const uint4*>(from) + i,
                       true);
}

/// The tokens and chunks of a block's sequence.
struct DeltaSequence {
  int begin;
  int end;

  __device__ DeltaSequence(const DeltaOperands& x, int idx)
      : begin(x.bounds == nullptr ? 0 : x.bounds[idx]),
        end(x.bounds == nullptr ? x.tokens : x.bounds[idx + 1]) {}
  __device__ int first_chunk() const { return begin / kDeltaRows; }
  __device__ int last_chunk() const { return (end - 1) / kDeltaRows; }
  /// Whether the state before a chunk is this sequence's; of each chunk's first token one is.
  __device__ bool has_first(int chunk) const {
    return begin <= chunk * kDeltaRows && chunk * kDeltaRows < end;
  }
  /// The same of the state behind.
  __device__ bool has_last(int chunk, int tokens) const {
    return end >= min((chunk + 1) * kDeltaRows, tokens);
  }
};

/// Where a chunk's rows of a head lie.
struct FastPlace {
  const DeltaOperands& x;
  int chunk;
  int head;

  __device__ int64_t token() const { return static_cast<int64_t>(chunk) * kDeltaRows; }
  __device__ int count() const { return min(kDeltaRows, x.tokens - chunk * kDeltaRows); }
  __device__ int64_t key_at() const { return x.key_at(token(), x.key_head(head)); }
  __device__ int64_t value_at() const { return x.value_at(token(), head); }
  __device__ int64_t task() const { return static_cast<int64_t>(chunk) * x.heads + head; }
  __device__ int64_t square_at() const { return task() * kDeltaSquare; }
  __device__ int64_t state_at() const {
    return task() * (static_cast<int64_t>(x.key_size) * x.value_size);
  }
};

/// Two neighbouring columns of P and A.
struct SquareColumns {
  int2 starts;
  float2 sums;
  float2 keys;  // 1 / |k_j|

  __device__ __forceinline__ SquareColumns(const DeltaFactors& c, int column)
      : starts(*reinterpret_cast<const int2*>(c.starts + column)),
        sums(*reinterpret_cast<const float2*>(c.sums + column)),
        keys(*reinterpret_cast<const float2*>(c.k_inverse + column)) {}
};

/// Row i of P, or of A where it is of keys: its elements' factors.
struct SquareRow {
  int idx;
  int last;      // column that the row's token is reached by
  int start;     // of its sequence
  float sum;     // G_i
  float key;     // 1 / |k_i|
  float weight;  // what multiplies the row's gradients

  __device__ __forceinline__ SquareRow(const DeltaFactors& c, int row, bool of_keys)
      : idx(row),
        last(of_keys ? row - 1 : row),
        start(row < c.count ? c.starts[row] : INT32_MIN),
        sum(c.sums[row]),
        key(c.k_inverse[row]),
        weight(of_keys ? -c.beta[row] * key : c.q_inverse[row]) {}
  /// exp(G_i - G_j) / |k_j|, or 0 where j's token does not reach i's. Without branches.
  __device__ __forceinline__ float factor(int j, int start_of_j, float sum_of_j,
                                          float key_of_j) const {
    const bool is_used = (j <= last) & (start_of_j == start);
    const float between = fast_exp2(fminf(sum - sum_of_j, 0.0F) * kLog2E);
    return is_used ? between * key_of_j : 0;
  }
};

/// Of the values of a chunk's rows 2 i and 2 i + 1, that a warp's lane i has: the sums from the
/// beginning of each row's sequence to the row.
__device__ __forceinline__ float2 sum_from_starts(float2 values, int2 starts) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (starts.x == starts.y) values.y += values.x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float earlier = __shfl_up_sync(~0U, values.y, step);
    const int start = __shfl_up_sync(~0U, starts.y, step);
    if (lane >= step && start == starts.x) values.x += earlier;
    if (lane >= step && start == starts.y) values.y += earlier;
  }
  return values;
}
/// The sums from each row to the end of its sequence.
__device__ __forceinline__ float2 sum_to_ends(float2 values, int2 starts) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (starts.x == starts.y) values.x += values.y;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float later = __shfl_down_sync(~0U, values.x, step);
    const int start = __shfl_down_sync(~0U, starts.x, step);
    if (lane + step < 32 && start == starts.y) values.y += later;
    if (lane + step < 32 && start == starts.x) values.x += later;
  }
  return values;
}

__device__ __forceinline__ const BFloat16* bf16(const void* data) {
  return static_cast<const BFloat16*>(data);
}
__device__ __forceinline__ BFloat16* bf16(void* data) {
  return static_cast<BFloat16*>(data);
}

}  // namespace tessera::cuda
