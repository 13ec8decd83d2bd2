#pragma once

#include <cuda_bf16.h>

#include <cstdint>

/// Products in F32 on the ordinary cores: a block makes a tile of kExactRows by kColumns; tiles of
/// both operands go through two buffers of shared memory, and a thread multiplies up to 8 by 8 of
/// their values in registers. BF16 values are widened as they are read. The order of a sum is that
/// of the reduction.
namespace tessera::cuda {

constexpr int kExactThreads = 128;
constexpr int kExactRows = 64;
constexpr int kExactDepth = 16;   // of the reduction, at a time
constexpr int kExactPadding = 4;  // keeps stores of transposed tiles off each other's banks

__device__ __forceinline__ float4 load_four(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}
__device__ __forceinline__ float4 load_four(const __nv_bfloat16* from) {
  const uint2 words = *reinterpret_cast<const uint2*>(from);
  return {__uint_as_float(words.x << 16), __uint_as_float(words.x & 0xFFFF0000U),
          __uint_as_float(words.y << 16), __uint_as_float(words.y & 0xFFFF0000U)};
}

__device__ __forceinline__ void store_value(float* to, float value) {
  *to = value;
}
__device__ __forceinline__ void store_value(__nv_bfloat16* to, float value) {
  *to = __float2bfloat16_rn(value);
}

/// An operand, [rows, reduction] or, where its rows are contiguous, [reduction, rows]. Rows beyond
/// `rows` read as zero.
template <typename T, bool kReductionContiguous>
struct ExactOperand {
  const T* data;
  int64_t rows;
  int64_t stride;  // of the dim that is not contiguous
  bool vectors;    // four values can be read at once

  __host__ __device__ ExactOperand(const T* from, int64_t num_rows, int64_t outer_stride)
      : data(from),
        rows(num_rows),
        stride(outer_stride),
        vectors(outer_stride % 4 == 0 && reinterpret_cast<uintptr_t>(from) % (4 * sizeof(T)) == 0) {
  }

  /// Four neighbours, of which `count` are there.
  __device__ __forceinline__ float4 four(int64_t offset, int64_t count) const {
    if (count <= 0) return {0, 0, 0, 0};
    const T* from = data + offset;
    if (vectors && count >= 4) return load_four(from);
    const auto value = [&](int i) { return count > i ? static_cast<float>(from[i]) : 0.0F; };
    return {value(0), value(1), value(2), value(3)};
  }
};

/// A tile on its way from global to shared memory, where it lies [kExactDepth][kRows].
template <typename T, bool kReductionContiguous, int kRows>
struct ExactStage {
  static constexpr int kFours = kRows * kExactDepth / 4;
  static constexpr int kHeld = (kFours + kExactThreads - 1) / kExactThreads;
  using Shared = float[kExactDepth][kRows + kExactPadding];

  float4 held[kHeld];

  __device__ __forceinline__ void load(const ExactOperand<T, kReductionContiguous>& from,
                                       int64_t row, int64_t step, int64_t last) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int four = i * kExactThreads + static_cast<int>(threadIdx.x);
      if (kFours % kExactThreads != 0 && four >= kFours) break;
      if (kReductionContiguous) {
        const int64_t r = row + four / (kExactDepth / 4);
        const int64_t k = step + four % (kExactDepth / 4) * 4;
        held[i] = from.four(r * from.stride + k, r < from.rows ? last - k : 0);
      } else {
        const int64_t k = step + four / (kRows / 4);
        const int64_t r = row + four % (kRows / 4) * 4;
        held[i] = from.four(k * from.stride + r, k < last ? from.rows - r : 0);
      }
    }
  }

  __device__ __forceinline__ void store(Shared& to) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int four = i * kExactThreads + static_cast<int>(threadIdx.x);
      if (kFours % kExactThreads != 0 && four >= kFours) break;
      if (kReductionContiguous) {
        const int r = four / (kExactDepth / 4);
        const int k = four % (kExactDepth / 4) * 4;
        to[k][r] = held[i].x;
        to[k + 1][r] = held[i].y;
        to[k + 2][r] = held[i].z;
        to[k + 3][r] = held[i].w;
      } else {
        *reinterpret_cast<float4*>(&to[four / (kRows / 4)][four % (kRows / 4) * 4]) = held[i];
      }
    }
  }
};

/// Which rows of a tile a thread multiplies: kEach, in fours that lie apart, so that neighbouring
/// threads read neighbouring fours.
template <int kRows, int kEach>
struct ExactShare {
  static constexpr int kVector = kEach < 4 ? kEach : 4;
  static constexpr int kOwners = kRows / kEach;
  static_assert(kVector == 4 || kVector == 2);

  static __device__ __forceinline__ int row(int owner, int i) {
    return i / kVector * (kOwners * kVector) + owner * kVector + i % kVector;
  }
  static __device__ __forceinline__ void read(const float* tile, int owner, float (&to)[kEach]) {
#pragma unroll
    for (int i = 0; i < kEach; i += kVector) {
      const float* from = tile + row(owner, i);
      if constexpr (kVector == 4) {
        const float4 four = *reinterpret_cast<const float4*>(from);
        to[i] = four.x;
        to[i + 1] = four.y;
        to[i + 2] = four.z;
        to[i + 3] = four.w;
      } else {
        const float2 two = *reinterpret_cast<const float2*>(from);
        to[i] = two.x;
        to[i + 1] = two.y;
      }
    }
  }
};

/// The sums of a tile, spread over the block's kExactThreads threads. kColumns is 16, 64 or 128.
template <typename OperandA, typename OperandB, int kColumns>
struct ExactTile;

template <typename A, bool kAReduction, typename B, bool kBReduction, int kColumns>
struct ExactTile<ExactOperand<A, kAReduction>, ExactOperand<B, kBReduction>, kColumns> {
  static constexpr int kEachRow = kColumns >= 64 ? 8 : 4;
  static constexpr int kEachColumn = kExactRows * kColumns / kExactThreads / kEachRow;
  using Rows = ExactShare<kExactRows, kEachRow>;
  using Columns = ExactShare<kColumns, kEachColumn>;
  using StageA = ExactStage<A, kAReduction, kExactRows>;
  using StageB = ExactStage<B, kBReduction, kColumns>;

  struct Shared {
    alignas(16) typename StageA::Shared a[2];
    alignas(16) typename StageB::Shared b[2];
  };

  float sums[kEachRow][kEachColumn] = {};

  /// Adds a's rows from `row` on times b's from `column` on, over [first, last) of the reduction.
  /// All threads of the block take part.
  __device__ __forceinline__ void add(Shared& shared, const ExactOperand<A, kAReduction>& a,
                                      int64_t row, const ExactOperand<B, kBReduction>& b,
                                      int64_t column, int64_t first, int64_t last) {
    StageA stage_a;
    StageB stage_b;
    stage_a.load(a, row, first, last);
    stage_b.load(b, column, first, last);
    stage_a.store(shared.a[0]);
    stage_b.store(shared.b[0]);
    __syncthreads();
    int buffer = 0;
    for (int64_t step = first; step < last; step += kExactDepth) {
      const bool more = step + kExactDepth < last;
      if (more) {
        stage_a.load(a, row, step + kExactDepth, last);
        stage_b.load(b, column, step + kExactDepth, last);
      }
      multiply(shared.a[buffer], shared.b[buffer]);
      if (more) {
        stage_a.store(shared.a[buffer ^ 1]);
        stage_b.store(shared.b[buffer ^ 1]);
      }
      __syncthreads();
      buffer ^= 1;
    }
  }

  /// Calls take(row of the tile, column of the tile, sum) for each of the thread's sums.
  template <typename Take>
  __device__ __forceinline__ void for_each(Take take) const {
#pragma unroll
    for (int i = 0; i < kEachRow; ++i) {
#pragma unroll
      for (int j = 0; j < kEachColumn; ++j)
        take(Rows::row(row_owner(), i), Columns::row(column_owner(), j), sums[i][j]);
    }
  }

 private:
  static __device__ __forceinline__ int column_owner() {
    return threadIdx.x % Columns::kOwners;
  }
  static __device__ __forceinline__ int row_owner() {
    return threadIdx.x / Columns::kOwners;
  }

  __device__ __forceinline__ void multiply(const typename StageA::Shared& a,
                                           const typename StageB::Shared& b) {
#pragma unroll
    for (int k = 0; k < kExactDepth; ++k) {
      float of_a[kEachRow], of_b[kEachColumn];
      Rows::read(a[k], row_owner(), of_a);
      Columns::read(b[k], column_owner(), of_b);
#pragma unroll
      for (int i = 0; i < kEachRow; ++i) {
#pragma unroll
        for (int j = 0; j < kEachColumn; ++j) sums[i][j] = fmaf(of_a[i], of_b[j], sums[i][j]);
      }
    }
  }
};

}  // namespace tessera::cuda
