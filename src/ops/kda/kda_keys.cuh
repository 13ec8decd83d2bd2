#pragma once

#include "ops/cuda/ptx/fast_exp.cuh"
#include "ops/kda/kda_place.cuh"

/// What chunks need of their own keys and queries.
namespace tessera::cuda {

constexpr int kDecayThreads = 128;

/// What is kept of a chunk's keys and queries, in F32 or BF16: KdaChunks says what.
template <typename Kept>
struct KdaKeys {
  DeltaMarks marks;
  float* sums;
  Kept* q_kept;
  Kept* k_kept;
  Kept* k_rest;
  float* kept;
};

/// A thread takes an element of a chunk's keys.
template <typename T, typename Kept>
__global__ void __launch_bounds__(kDecayThreads)
    decay_keys(const __grid_constant__ DeltaOperands x, KdaKeys<Kept> chunks) {
  wait_for_earlier();
  const KdaPlace<T> at{{x, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y)}};
  const int element = static_cast<int>(blockIdx.z) * kDecayThreads + static_cast<int>(threadIdx.x);
  if (element >= x.key_size) return;
  const int count = at.count();
  const auto first = static_cast<int>(at.token());
  const int64_t begin = at.key_at() + element;
  float sum = 0;
  for (int i = 0; i < count; ++i) {
    const int64_t key = begin + i * x.key_stride();
    const int start = at.start(chunks.marks, i);
    sum = (start == first + i ? 0 : sum) + x.decay[key];
    const float reads = start < first ? expf(sum) : 0;
    const float q = load<1>(static_cast<const T*>(x.q) + key)[0];
    const float k = load<1>(static_cast<const T*>(x.k) + key)[0];
    chunks.sums[key] = sum;
    store_value(chunks.q_kept + key,
                q * at.of_row(chunks.marks.q_inverse, i) * kda_query_scale(x) * reads);
    store_value(chunks.k_kept + key, k * at.of_row(chunks.marks.k_inverse, i) * reads);
  }
  const int last_start = at.start(chunks.marks, count - 1);
  for (int i = 0; i < count; ++i) {
    const int64_t key = begin + i * x.key_stride();
    const float writes = at.start(chunks.marks, i) == last_start ? expf(sum - chunks.sums[key]) : 0;
    const float k = load<1>(static_cast<const T*>(x.k) + key)[0];
    store_value(chunks.k_rest + key, k * at.of_row(chunks.marks.k_inverse, i) * writes);
  }
  chunks.kept[at.kept_at() + element] = last_start < first ? expf(sum) : 0;
}

constexpr int kPairDepth = 16;  // elements of keys at a time
constexpr int kPairRows = 4;    // of a tile of pairs
constexpr int kPairTileRows = kDeltaRows / kPairRows;
constexpr int kPairsBelow = kPairTileRows * (kPairTileRows - 1) / 2;  // tiles below the diagonal
static_assert(kPairsBelow < kExactThreads &&
              kPairsBelow + kPairTileRows <= kExactThreads + kExactThreads - kPairsBelow);

/// Elements of a chunk's unit queries and keys, and of the sums of their decays.
struct KeySlices {
  static constexpr int kStride = kDeltaRows + 4;
  alignas(16) float q[kPairDepth][kStride];
  alignas(16) float k[kPairDepth][kStride];
  alignas(16) float sums[kPairDepth][kStride];  // in units of log 2
};

/// Pairs of a chunk's tokens, the reader not before the writer: each thread has a tile below the
/// diagonal, and those for which there is none have up to two on it.
template <typename T>
struct KdaPairs {
  const DeltaOperands& x;
  const DeltaMarks& marks;
  const float* key_sums;  ///< [T, N, Dk]
  const KdaPlace<T>& at;

  /// A tile's readers and writers, from which rows on, and its sums.
  struct Tile {
    int reader = -1;  ///< -1: there is none
    int writer = 0;
    float of_queries[kPairRows][kPairRows] = {};
    float of_keys[kPairRows][kPairRows] = {};

    /// Below the diagonal exp(G_i - G_j) = exp(G_i - G_r) exp(G_r - G_j) with the first reader r,
    /// neither above 1; across sequences, where it may be, pairs are masked.
    __device__ __forceinline__ void add_below(const KeySlices& slices, int e) {
      const float4 q = four(slices.q[e], reader);
      const float4 k = four(slices.k[e], reader);
      const float4 sums = four(slices.sums[e], reader);
      const float4 writer_keys = four(slices.k[e], writer);
      const float4 writer_sums = four(slices.sums[e], writer);
      float of_writer[kPairRows];
#pragma unroll
      for (int j = 0; j < kPairRows; ++j)
        of_writer[j] = of(writer_keys, j) * fast_exp2(fminf(of(sums, 0) - of(writer_sums, j), 0));
#pragma unroll
      for (int i = 0; i < kPairRows; ++i) {
        const float factor = i == 0 ? 1 : fast_exp2(fminf(of(sums, i) - of(sums, 0), 0));
        const float own_q = of(q, i) * factor;
        const float own_k = of(k, i) * factor;
#pragma unroll
        for (int j = 0; j < kPairRows; ++j) {
          of_queries[i][j] = fmaf(own_q, of_writer[j], of_queries[i][j]);
          of_keys[i][j] = fmaf(own_k, of_writer[j], of_keys[i][j]);
        }
      }
    }
    __device__ __forceinline__ void add_diagonal(const KeySlices& slices, int e) {
      const float4 q = four(slices.q[e], reader);
      const float4 k = four(slices.k[e], reader);
      const float4 sums = four(slices.sums[e], reader);
#pragma unroll
      for (int i = 0; i < kPairRows; ++i) {
#pragma unroll
        for (int j = 0; j <= i; ++j) {
          const float factor = i == j ? 1 : fast_exp2(fminf(of(sums, i) - of(sums, j), 0));
          const float decayed = of(k, j) * factor;
          of_queries[i][j] = fmaf(of(q, i), decayed, of_queries[i][j]);
          of_keys[i][j] = fmaf(of(k, i), decayed, of_keys[i][j]);
        }
      }
    }

   private:
    static __device__ __forceinline__ float4 four(const float* row, int first) {
      return *reinterpret_cast<const float4*>(row + first);
    }
    static __device__ __forceinline__ float of(const float4& values, int i) {
      return i == 0 ? values.x : i == 1 ? values.y : i == 2 ? values.z : values.w;
    }
  };
  Tile tiles[2];

  /// Says which tiles are this thread's.
  __device__ void begin() {
    const auto thread = static_cast<int>(threadIdx.x);
    if (thread < kPairsBelow) {
      int row = 1;
      while (row * (row + 1) / 2 <= thread) ++row;
      tiles[0].reader = row * kPairRows;
      tiles[0].writer = (thread - row * (row - 1) / 2) * kPairRows;
      return;
    }
#pragma unroll
    for (int turn = 0; turn < 2; ++turn) {
      const int row = thread - kPairsBelow + turn * (kExactThreads - kPairsBelow);
      if (row >= kPairTileRows) return;
      tiles[turn].reader = row * kPairRows;
      tiles[turn].writer = row * kPairRows;
    }
  }

  __device__ void load(KeySlices& slices, int first) const {
    const int count = at.count();
    for (int n = static_cast<int>(threadIdx.x); n < kPairDepth * kDeltaRows; n += kExactThreads) {
      const int i = n / kPairDepth;
      const int e = n % kPairDepth;
      const bool there = i < count && first + e < x.key_size;
      const int64_t key = at.key_at() + i * x.key_stride() + first + e;
      slices.q[e][i] = there ? cuda::load<1>(static_cast<const T*>(x.q) + key)[0] : 0;
      slices.k[e][i] = there ? cuda::load<1>(static_cast<const T*>(x.k) + key)[0] : 0;
      slices.sums[e][i] = there ? key_sums[key] * kLog2E : 0;
    }
    __syncthreads();
  }

  /// Of all elements; ends with a barrier.
  __device__ void find(KeySlices& slices) {
    begin();
    for (int first = 0; first < x.key_size; first += kPairDepth) {
      load(slices, first);
      for (int e = 0; e < kPairDepth; ++e) {
        if (tiles[0].reader != tiles[0].writer) {
          tiles[0].add_below(slices, e);
        } else {
          tiles[0].add_diagonal(slices, e);
        }
        if (tiles[1].reader >= 0) tiles[1].add_diagonal(slices, e);
      }
      __syncthreads();
    }
  }

  /// Calls give(i, j, P_ij, A_ij) for all pairs, each by one thread; both are 0 where i does not
  /// read j, A without beta.
  template <typename Give>
  __device__ void for_each(const Give& give) const {
#pragma unroll
    for (const Tile& tile : tiles) {
      if (tile.reader < 0) continue;
#pragma unroll
      for (int r = 0; r < kPairRows; ++r) {
#pragma unroll
        for (int c = 0; c < kPairRows; ++c) {
          give_pair(tile.reader + r, tile.writer + c, tile.of_queries[r][c], tile.of_keys[r][c],
                    give);
          if (tile.reader != tile.writer) give(tile.writer + c, tile.reader + r, 0.0F, 0.0F);
        }
      }
    }
  }

 private:
  template <typename Give>
  __device__ __forceinline__ void give_pair(int i, int j, float of_queries, float of_keys,
                                            const Give& give) const {
    const bool joined = j <= i && i < at.count() && at.start(marks, i) == at.start(marks, j);
    const float scale = joined ? at.of_row(marks.k_inverse, j) : 0;
    give(i, j, joined ? of_queries * scale * kda_query_scale(x) * at.of_row(marks.q_inverse, i) : 0,
         joined && j < i ? of_keys * scale * at.of_row(marks.k_inverse, i) : 0);
  }
};

}  // namespace tessera::cuda
