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
constexpr int kPairOwnRows = 8;
constexpr int kPairOwnColumns = 4;
constexpr int kPairColumnOwners = kDeltaRows / kPairOwnColumns;
static_assert(kDeltaSquare == kExactThreads * kPairOwnRows * kPairOwnColumns);

/// Elements of a chunk's unit queries and keys, and of the sums of their decays.
struct KeySlices {
  float q[kPairDepth][kDeltaRows + 1];
  float k[kPairDepth][kDeltaRows + 1];
  float sums[kPairDepth][kDeltaRows + 1];  // in units of log 2
};

/// Pairs of a chunk's tokens: a thread has 8 readers by 4 writers.
template <typename T>
struct KdaPairs {
  const DeltaOperands& x;
  const DeltaMarks& marks;
  const float* key_sums;  ///< [T, N, Dk]
  const KdaPlace<T>& at;
  float of_queries[kPairOwnRows][kPairOwnColumns] = {};
  float of_keys[kPairOwnRows][kPairOwnColumns] = {};

  static __device__ int row(int i) {
    return static_cast<int>(threadIdx.x) / kPairColumnOwners * kPairOwnRows + i;
  }
  static __device__ int column(int j) {
    return static_cast<int>(threadIdx.x) % kPairColumnOwners * kPairOwnColumns + j;
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
    for (int first = 0; first < x.key_size; first += kPairDepth) {
      load(slices, first);
      add(slices);
    }
  }

  /// Calls give(i, j, P_ij, A_ij) for the thread's pairs; both are 0 where i does not read j, A
  /// without beta.
  template <typename Give>
  __device__ void for_each(const Give& give) const {
    const int count = at.count();
#pragma unroll
    for (int r = 0; r < kPairOwnRows; ++r) {
#pragma unroll
      for (int c = 0; c < kPairOwnColumns; ++c) {
        const int i = row(r);
        const int j = column(c);
        const bool joined = j <= i && i < count && at.start(marks, i) == at.start(marks, j);
        const float scale = joined ? at.of_row(marks.k_inverse, j) : 0;
        give(i, j,
             joined ? of_queries[r][c] * scale * kda_query_scale(x) * at.of_row(marks.q_inverse, i)
                    : 0,
             joined && j < i ? of_keys[r][c] * scale * at.of_row(marks.k_inverse, i) : 0);
      }
    }
  }

  /// Of elements of keys that are in shared memory. A later token's factor is 1 here: it is masked.
  __device__ void add(const KeySlices& slices) {
    for (int e = 0; e < kPairDepth; ++e) {
#pragma unroll
      for (int j = 0; j < kPairOwnColumns; ++j) {
        const float k = slices.k[e][column(j)];
        const float sum = slices.sums[e][column(j)];
#pragma unroll
        for (int i = 0; i < kPairOwnRows; ++i) {
          const float decayed = k * fast_exp2(fminf(slices.sums[e][row(i)] - sum, 0));
          of_queries[i][j] += slices.q[e][row(i)] * decayed;
          of_keys[i][j] += slices.k[e][row(i)] * decayed;
        }
      }
    }
    __syncthreads();
  }
};

}  // namespace tessera::cuda
