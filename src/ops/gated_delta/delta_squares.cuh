#pragma once

#include "ops/cuda/tile/row_quads.cuh"
#include "ops/gated_delta/delta_fast.cuh"

/// The inverse of I + A of a chunk, by a block whose warps have 16 rows each.
namespace tessera::cuda {

constexpr int kSquareThreads = 128;
constexpr int kMatrixStride = kDeltaRows + 4;

constexpr int kInvertedBlock = 16;

/// The inverse of I plus the block of A on the diagonal that is the warp's, in its place: each of
/// 16 lanes makes a column.
__device__ __forceinline__ void invert_blocks(float* a) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int j = static_cast<int>(threadIdx.x) % 32;
  float* block = a + warp * kInvertedBlock * (kMatrixStride + 1);
  float column[kInvertedBlock];
  if (j < kInvertedBlock) {
#pragma unroll
    for (int i = 0; i < kInvertedBlock; ++i) {
      float value = i == j ? 1 : 0;
#pragma unroll
      for (int m = 0; m < i; ++m) value -= block[i * kMatrixStride + m] * column[m];
      column[i] = value;
    }
  }
  __syncwarp();
  if (j < kInvertedBlock) {
#pragma unroll
    for (int i = 0; i < kInvertedBlock; ++i) block[i * kMatrixStride + j] = column[i];
  }
}

/// An F32 value as the sum of two that tensor cores take.
struct SplitValue {
  uint32_t high;
  uint32_t low;

  __device__ __forceinline__ explicit SplitValue(float x) {
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(high) : "f"(x));
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(low) : "f"(x - __uint_as_float(high)));
  }
};

__device__ __forceinline__ void multiply_tf32(float (&sums)[4], const uint32_t (&a)[4],
                                              const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/// A warp's 16 by 8 sums of left times right over kDepth, nearly as exact as F32's.
template <int kDepth>
__device__ __forceinline__ void multiply_exactly(float (&sums)[4], const float* left,
                                                 const float* right) {
  const int line = static_cast<int>(threadIdx.x) % 32 / 4;
  const int step = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int k = 0; k < kDepth; k += 8) {
    uint32_t high_a[4];
    uint32_t low_a[4];
    uint32_t high_b[2];
    uint32_t low_b[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const SplitValue x(left[(line + i % 2 * 8) * kMatrixStride + k + step + i / 2 * 4]);
      high_a[i] = x.high;
      low_a[i] = x.low;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const SplitValue x(right[(k + step + i * 4) * kMatrixStride + line]);
      high_b[i] = x.high;
      low_b[i] = x.low;
    }
    multiply_tf32(sums, low_a, high_b);
    multiply_tf32(sums, high_a, low_b);
    multiply_tf32(sums, high_a, high_b);
  }
}

__device__ __forceinline__ void store_sums(float* to, const float (&sums)[4], float factor) {
  to += static_cast<int>(threadIdx.x) % 32 / 4 * kMatrixStride +
        static_cast<int>(threadIdx.x) % 4 * 2;
  *reinterpret_cast<float2*>(to) = {factor * sums[0], factor * sums[1]};
  *reinterpret_cast<float2*>(to + 8 * kMatrixStride) = {factor * sums[2], factor * sums[3]};
}

/// From inverses of neighbouring blocks of kSize on the diagonal those of blocks twice as large: of
/// [[X, 0], [Y, Z]] that is [[X', 0], [-Z' Y X', Z']]. Ends with a barrier, as it begins.
template <int kSize>
__device__ __forceinline__ void join_blocks(float* a) {
  constexpr int kPairs = kDeltaRows / (2 * kSize);
  constexpr int kPairWarps = kSquareThreads / 32 / kPairs;
  constexpr int kColumns = kSize * kSize / 16 / kPairWarps;  // of a warp, which has 16 rows
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int row = warp % kPairWarps * kColumns / kSize * 16;
  const int column = warp % kPairWarps * kColumns % kSize;
  float* upper = a + warp / kPairWarps * 2 * kSize * (kMatrixStride + 1);
  float* lower = upper + kSize * kMatrixStride;
  float* to = lower + row * kMatrixStride + column;
  float sums[kColumns / 8][4] = {};
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kColumns / 8; ++i)
    multiply_exactly<kSize>(sums[i], lower + row * kMatrixStride, upper + column + 8 * i);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kColumns / 8; ++i) {
    store_sums(to + 8 * i, sums[i], -1);
    sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kColumns / 8; ++i)
    multiply_exactly<kSize>(sums[i], lower + row * kMatrixStride + kSize, lower + column + 8 * i);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kColumns / 8; ++i) store_sums(to + 8 * i, sums[i], 1);
  __syncthreads();
}

/// (I + A)^-1, rounded; A's place has it before.
__device__ __forceinline__ void invert(BFloat16* inverse, float* a) {
  invert_blocks(a);
  join_blocks<kInvertedBlock>(a);
  join_blocks<2 * kInvertedBlock>(a);
#pragma unroll
  for (int i = 4 * static_cast<int>(threadIdx.x); i < kDeltaSquare; i += 4 * kSquareThreads) {
    const int row = i / kDeltaRows;
    const int column = i % kDeltaRows;
    const float4 four = *reinterpret_cast<const float4*>(a + row * kMatrixStride + column);
    *reinterpret_cast<uint2*>(inverse + row * kSquareStride + column) = {pack_pair(four.x, four.y),
                                                                         pack_pair(four.z, four.w)};
  }
}

/// To scratch memory: the inverse, and P times it. By all threads behind a barrier.
__device__ __forceinline__ void write_inverses(const FastDelta& scratch, const FastPlace& at,
                                               const BFloat16* inverse, const BFloat16* p) {
  const int row = static_cast<int>(threadIdx.x) / 32 * 16;
  write_rows<kDeltaRows, kDeltaRows, kSquareThreads>(bf16(scratch.inverse) + at.square_at(),
                                                     kDeltaRows, inverse);
  WarpTile<16, kDeltaRows> tile;
  tile.add<true, false, kDeltaRows>({p, kSquareStride}, row, {inverse, kSquareStride}, 0);
  BFloat16* to = bf16(scratch.p_inverse) + at.square_at();
  tile.for_each_pair([&](int i, int j, float& first, float& second) {
    store_pair(to + (row + i) * kDeltaRows + j, first, second);
  });
}

}  // namespace tessera::cuda
