#pragma once

#include "ops/cuda/ptx/fast_exp.cuh"
#include "ops/kda/kda_place.cuh"

/// What reaches an element of a chunk's queries and keys through pairs of tokens, and the end of
/// the backward pass: each thread has one element.
namespace tessera::cuda {

constexpr int kPairTokens = 8;  // that a thread holds at a time, as readers and as writers
constexpr int kPairTiles = kDeltaRows / kPairTokens;

/// What a chunk's threads share.
struct PairShared {
  /// Gradients of P and A, of tiles on the diagonal and below, each [writer][reader].
  float2 of_squares[kPairTiles * (kPairTiles + 1) / 2][kPairTokens][kPairTokens];
  float of_writers[kDeltaRows][kExactThreads];  // a column is its thread's alone
  float q_inverse[kDeltaRows];                  // with the queries' scale
  float k_inverse[kDeltaRows];
  int starts[kDeltaRows];

  static __device__ __forceinline__ int tile(int readers, int writers) {
    return readers * (readers + 1) / 2 + writers;
  }

  /// By all threads of the block; ends with a barrier. What is not there is 0.
  template <typename T>
  __device__ void load_from(const KdaPlace<T>& at, const KdaFinishScratch& scratch) {
    const auto i = static_cast<int>(threadIdx.x);
    if (i < kDeltaRows) {
      const bool there = i < at.count();
      q_inverse[i] = there ? at.of_row(scratch.marks.q_inverse, i) * kda_query_scale(at.x) : 0;
      k_inverse[i] = there ? at.of_row(scratch.marks.k_inverse, i) : 0;
      starts[i] = there ? at.start(scratch.marks, i) : INT32_MIN;
    }
    const float* p = scratch.p + at.square_at();
    const float* a = scratch.a + at.square_at();
    for (int n = i; n < kDeltaSquare; n += kExactThreads) {
      const int reader = n / kDeltaRows;
      const int writer = n % kDeltaRows;
      if (writer / kPairTokens > reader / kPairTokens) continue;
      of_squares[tile(reader / kPairTokens, writer / kPairTokens)][writer % kPairTokens]
                [reader % kPairTokens] = {p[n], a[n]};
    }
    __syncthreads();
  }
};

/// What reaches queries and keys from the squares' gradients: a pair's factor exp(G_i - G_j) serves
/// the reader's query and key and the writer's key. Of tiles below the diagonal it is
/// exp(G_i - G_r) exp(G_r - G_j) with the first reader r, neither above 1, so that a token takes
/// one for all of them.
template <typename T>
struct KdaElement {
  const DeltaOperands& x;
  const KdaFinishScratch& scratch;
  const DeltaGrads& grads;
  const KdaPlace<T>& at;
  PairShared& shared;
  int count;
  int element;

  __device__ __forceinline__ int64_t place(int i) const {
    return at.key_at() + element + min(i, count - 1) * x.key_stride();
  }
  __device__ __forceinline__ float unit_q(int i) const {
    return load<1>(static_cast<const T*>(x.q) + place(i))[0] * shared.q_inverse[i];
  }
  __device__ __forceinline__ float unit_k(int i) const {
    return load<1>(static_cast<const T*>(x.k) + place(i))[0] * shared.k_inverse[i];
  }

  /// Tokens of a tile; those that are not there have zeros for keys and queries.
  struct Tokens {
    float sums[kPairTokens];  // in units of log 2
    float k[kPairTokens];
  };
  __device__ __forceinline__ Tokens tokens(int first) const {
    Tokens result;
#pragma unroll
    for (int t = 0; t < kPairTokens; ++t) {
      result.sums[t] = scratch.sums[place(first + t)] * kLog2E;
      result.k[t] = unit_k(first + t);
    }
    return result;
  }
  struct Readers : Tokens {
    float q[kPairTokens];
    float of_query[kPairTokens] = {};
    float of_key[kPairTokens] = {};

    __device__ __forceinline__ explicit Readers(const Tokens& tokens) : Tokens(tokens) {}
  };

  /// Adds what readers have to of_q and of_k; leaves what writers have in shared memory.
  __device__ void add_pairs() {
    for (int j = 0; j < kDeltaRows; ++j) shared.of_writers[j][threadIdx.x] = 0;
    for (int i = 0; i * kPairTokens < count; ++i) {
      Readers readers(tokens(i * kPairTokens));
#pragma unroll
      for (int t = 0; t < kPairTokens; ++t) readers.q[t] = unit_q(i * kPairTokens + t);
      add_below(i, readers);
      add_diagonal(i, readers);
#pragma unroll
      for (int t = 0; t < kPairTokens; ++t) {
        if (i * kPairTokens + t >= count) break;
        scratch.of_q[place(i * kPairTokens + t)] += readers.of_query[t];
        scratch.of_k[place(i * kPairTokens + t)] += readers.of_key[t];
      }
    }
  }

  /// Squares' gradients are zero where no token reads what the other writes.
  __device__ __forceinline__ void add_below(int i, Readers& readers) {
    float factors[kPairTokens];
    float q[kPairTokens];
    float k[kPairTokens];
#pragma unroll
    for (int r = 0; r < kPairTokens; ++r) {
      factors[r] = r == 0 ? 1 : fast_exp2(fminf(readers.sums[r] - readers.sums[0], 0));
      q[r] = readers.q[r] * factors[r];
      k[r] = readers.k[r] * factors[r];
    }
    Tokens next = tokens(0);  // under way while a tile is added
    for (int j = 0; j < i; ++j) {
      const Tokens writers = next;
      next = tokens((j + 1) * kPairTokens);
      const auto& of_squares = shared.of_squares[PairShared::tile(i, j)];
#pragma unroll
      for (int w = 0; w < kPairTokens; ++w) {
        const float left = fast_exp2(fminf(readers.sums[0] - writers.sums[w], 0));
        const float key = writers.k[w] * left;
        float of_query = 0;
        float of_key = 0;
#pragma unroll
        for (int r = 0; r < kPairTokens; ++r) {
          const float2 of_pair = of_squares[w][r];
          readers.of_query[r] = fmaf(of_pair.x, key, readers.of_query[r]);
          readers.of_key[r] = fmaf(of_pair.y, key, readers.of_key[r]);
          of_query = fmaf(of_pair.x, q[r], of_query);
          of_key = fmaf(of_pair.y, k[r], of_key);
        }
        shared.of_writers[j * kPairTokens + w][threadIdx.x] += left * (of_query + of_key);
      }
    }
#pragma unroll
    for (int r = 0; r < kPairTokens; ++r) {
      readers.of_query[r] *= factors[r];
      readers.of_key[r] *= factors[r];
    }
  }

  __device__ __forceinline__ void add_diagonal(int i, Readers& readers) {
    const auto& of_squares = shared.of_squares[PairShared::tile(i, i)];
#pragma unroll
    for (int w = 0; w < kPairTokens; ++w) {
      float of_writer = 0;
#pragma unroll
      for (int r = w; r < kPairTokens; ++r) {
        const float2 of_pair = of_squares[w][r];
        const float left = r == w ? 1 : fast_exp2(fminf(readers.sums[r] - readers.sums[w], 0));
        const float key = readers.k[w] * left;
        readers.of_query[r] = fmaf(of_pair.x, key, readers.of_query[r]);
        readers.of_key[r] = fmaf(of_pair.y, key, readers.of_key[r]);
        of_writer = fmaf(fmaf(of_pair.x, readers.q[r], of_pair.y * readers.k[r]), left, of_writer);
      }
      shared.of_writers[i * kPairTokens + w][threadIdx.x] += of_writer;
    }
  }

  /// The gradients of unit queries and keys, and of decays: sums of those of G from a token to its
  /// sequence's last in the chunk.
  __device__ void finish() {
    float sum = scratch.of_last[at.kept_at() + element] + sum_of_rest();
    for (int first = (count - 1) / kPairTokens * kPairTokens; first >= 0; first -= kPairTokens) {
      float of_sum[kPairTokens];
#pragma unroll
      for (int t = 0; t < kPairTokens; ++t) {
        const int64_t key = place(first + t);
        const float of_query = scratch.of_q[key];
        const float of_reader = scratch.of_k[key];
        const float of_writer = grads.decay[key] + shared.of_writers[first + t][threadIdx.x];
        of_sum[t] = unit_q(first + t) * of_query + unit_k(first + t) * (of_reader - of_writer);
        if (first + t < count) scratch.of_k[key] = of_reader + of_writer;
      }
#pragma unroll
      for (int t = kPairTokens - 1; t >= 0; --t) {
        const int i = first + t;
        if (i >= count) continue;
        if (i + 1 < count && shared.starts[i] != shared.starts[i + 1]) sum = 0;
        sum += of_sum[t];
        grads.decay[place(i)] = sum;
      }
    }
  }

  __device__ float sum_of_rest() const {
    float sum = 0;
#pragma unroll 8
    for (int i = 0; i < count; ++i) sum += unit_k(i) * grads.decay[place(i)];
    return sum;
  }
};

}  // namespace tessera::cuda
