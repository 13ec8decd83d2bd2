// Attention of several sequences' new tokens over pages of keys and values. A block takes one
// token, up to eight query heads that share a key-value head, and a run of the keys that they see;
// where there are several runs, they are joined in their order (flash-decoding: Dao et al. 2023).
// Where runs end follows from the table's width alone, so a token's result depends on its own
// sequence alone. Prompts that paged_prompt.cu takes are left to it; tokens of others read their
// keys one by one, from the L2 cache.
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/fail.cuh"
#include "ops/cuda/ptx/async_copy.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/paged_attention/paged_attention_kernels.h"
#include "ops/paged_attention/pages.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr int kHeads = 8;  // of a block
constexpr int kKeys = 64;  // of a tile, in one page
constexpr int kScoresOfThread = kHeads * kKeys / kThreads;
constexpr int kPacksAtOnce = 8;                  // of a thread that loads keys
constexpr int64_t kMostSharedBytes = 113 << 10;  // with a tile's values too: of two blocks of an SM
static_assert(kPageTokens % kKeys == 0 && kHeads == 2 * kWarps && kScoresOfThread == 4);

template <typename T, int kWidth>
struct WriteMap {
  static constexpr int kUnroll = 2;
  static constexpr int kBlocks = 5;
  using Loaded = Pack<T, kWidth>;

  int64_t width;
  int64_t capacity;
  const T* rows;
  const int32_t* to;
  T* cache;

  __device__ Loaded load(int64_t row, uint32_t vector) const {
    return load_pack<kWidth>(rows + row * width + vector * kWidth);
  }
  __device__ void store(int64_t row, uint32_t vector, const Loaded& loaded) const {
    const int64_t own = to[row];
    if (own >= -1 && own < capacity) {
      if (own >= 0) cuda::store(cache + own * width + vector * kWidth, loaded);
    } else if (vector == 0) {
      fail("page_write: a row that the cache has not", own);
    }
  }
};

constexpr int kNoSequence = -1;  // a row after the last sequence's
constexpr int kOfPrompt = -2;    // another kernel's

/// A new token and the keys that it sees.
struct Query {
  int sequence;  // or one of the below
  int begin;
  int end;
};

/// By the block.
__device__ Query find_query(const PagedQueries& p, int row) {
  int low = 0;  // bounds up to the row, which do not fall
  for (int first = 0; first <= p.num_sequences; first += kThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    low += __syncthreads_count(i <= p.num_sequences && p.cu_seqlens[i] <= row);
  }
  if (low == 0 || low > p.num_sequences) return {kNoSequence, 0, 0};
  const int sequence = low - 1;
  const int own = p.cu_seqlens[low] - p.cu_seqlens[sequence];
  if (p.prompts_apart && own >= kLeastPromptTokens) return {kOfPrompt, 0, 0};
  const int length = p.lengths[sequence];
  if (own > length || length > p.pages_per_sequence * static_cast<int>(kPageTokens))
    fail("paged_attention: a sequence shorter than its new tokens, or longer than its pages",
         length);
  const int position = length - own + row - p.cu_seqlens[sequence];
  return {sequence, first_seen_key(position, p.window, p.chunk), position + 1};
}

/// The part of what a query sees that is in a run.
__device__ Query part_of_run(const Query& query, int run, int run_keys) {
  return {query.sequence, max(query.begin, run * run_keys), min(query.end, (run + 1) * run_keys)};
}

/// In shared memory, in F32 but for values: rows of `pitch` values, whose vectors of four lie in
/// different banks.
struct Shared {
  float* keys;     // [kKeys, pitch]
  float* queries;  // [kHeads, pitch]
  float* scores;   // [kKeys, kHeads]: then their exponentials
  float* factors;  // [kHeads]: of what was summed up before
  void* values;    // [kKeys, head_size_v] as they lie in memory, where there is room for a tile's
  int pitch;
  int vectors;  // of four values, of a row

  static __host__ __device__ int pitch_of(int head_size) { return ((head_size + 3) / 4 | 1) * 4; }
  static int64_t bytes(int head_size) {
    return static_cast<int64_t>(sizeof(float)) *
           ((kKeys + kHeads) * pitch_of(head_size) + kKeys * kHeads + kHeads);
  }
  __device__ Shared(float* memory, int head_size)
      : keys(memory), pitch(pitch_of(head_size)), vectors((head_size + 3) / 4) {
    queries = keys + kKeys * pitch;
    scores = queries + kHeads * pitch;
    factors = scores + kKeys * kHeads;
    values = factors + kHeads;
  }
};

/// Query heads of a block.
struct HeadGroup {
  int kv_head;
  int first;
  int count;
};

__device__ HeadGroup head_group(const PagedQueries& p) {
  const int shared_by = p.num_heads / p.num_kv_heads;
  const int groups = (shared_by + kHeads - 1) / kHeads;
  const int kv_head = static_cast<int>(blockIdx.y) / groups;
  const int skipped = static_cast<int>(blockIdx.y) % groups * kHeads;
  return {kv_head, kv_head * shared_by + skipped, min(kHeads, shared_by - skipped)};
}

/// By the block: the queries, and zeros for heads and values that are not there.
template <typename T>
__device__ void load_queries(const PagedQueries& p, const HeadGroup& heads, const Shared& shared) {
  const T* const q =
      static_cast<const T*>(p.q) + (int64_t{blockIdx.x} * p.num_heads + heads.first) * p.head_size;
  for (int head = 0; head < kHeads; ++head) {
    for (int i = static_cast<int>(threadIdx.x); i < 4 * shared.vectors; i += kThreads) {
      const bool there = head < heads.count && i < p.head_size;
      shared.queries[head * shared.pitch + i] =
          there ? load<1>(q + head * p.head_size + i)[0] : 0.0F;
    }
  }
}

/// By the block: a tile's keys, of which `begin` to `end` are there.
template <typename T, int kWidth>
__device__ void load_keys(const PagedQueries& p, const T* keys, int begin, int end,
                          const Shared& shared) {
  const int64_t stride = int64_t{p.num_kv_heads} * p.head_size;
  const int packs = p.head_size / kWidth;
  const int last = end * packs;
  for (int first = begin * packs + static_cast<int>(threadIdx.x); first < last;
       first += kPacksAtOnce * kThreads) {
    Pack<T, kWidth> loaded[kPacksAtOnce];
#pragma unroll
    for (int i = 0; i < kPacksAtOnce; ++i) {
      const int item = first + i * kThreads;
      const int key = item / packs;
      if (item < last)
        loaded[i] = load_pack<kWidth>(keys + key * stride + (item - key * packs) * kWidth);
    }
#pragma unroll
    for (int i = 0; i < kPacksAtOnce; ++i) {
      const int item = first + i * kThreads;
      if (item >= last) continue;
      const int key = item / packs;
      const Floats<kWidth> values = to_floats(loaded[i]);
      float* const to = shared.keys + key * shared.pitch + (item - key * packs) * kWidth;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) to[j] = values[j];
    }
  }
}

/// By the block: begins to copy a tile's values, of which `begin` to `end` are there.
template <typename T>
__device__ void fetch_values(const PagedQueries& p, const T* values, int begin, int end, T* to) {
  constexpr int kWidth = kVectorWidth<T>;
  const int64_t stride = int64_t{p.num_kv_heads} * p.head_size_v;
  const int packs = p.head_size_v / kWidth;
  for (int item = begin * packs + static_cast<int>(threadIdx.x); item < end * packs;
       item += kThreads) {
    const int key = item / packs;
    const int at = (item - key * packs) * kWidth;
    copy_async(reinterpret_cast<uint4*>(to + key * p.head_size_v + at),
               reinterpret_cast<const uint4*>(values + key * stride + at));
  }
  commit_copies();
}

__device__ __forceinline__ void add_products(float& sum, const float4& a, const float4& b) {
  sum += a.x * b.x;
  sum += a.y * b.y;
  sum += a.z * b.z;
  sum += a.w * b.w;
}

/// By the block: the scores of a tile; minus infinity for keys that are not seen.
__device__ void score(const PagedQueries& p, int begin, int end, const Shared& shared) {
  const int key = static_cast<int>(threadIdx.x) % kKeys;
  const int first_head = static_cast<int>(threadIdx.x) / kKeys * kScoresOfThread;
  float sums[kScoresOfThread] = {};
  if (key >= begin && key < end) {
    const auto* const row = reinterpret_cast<const float4*>(shared.keys + key * shared.pitch);
    const auto* const queries =
        reinterpret_cast<const float4*>(shared.queries + first_head * shared.pitch);
    for (int i = 0; i < shared.vectors; ++i) {
      const float4 values = row[i];
#pragma unroll
      for (int h = 0; h < kScoresOfThread; ++h)
        add_products(sums[h], values, queries[h * shared.pitch / 4 + i]);
    }
#pragma unroll
    for (float& sum : sums) sum *= p.scale;
  } else {
#pragma unroll
    for (float& sum : sums) sum = -INFINITY;
  }
  *reinterpret_cast<float4*>(shared.scores + key * kHeads + first_head) = {sums[0], sums[1],
                                                                           sums[2], sums[3]};
}

__device__ __forceinline__ float max_of_lanes(float x) {
  for (int lane = kWarp / 2; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(~0U, x, lane));
  return x;
}

/// What a warp knows of one of its heads: the largest score so far, and the sum of exponentials.
struct Softmax {
  float largest = -INFINITY;
  float sum = 0;

  /// By the warp: takes a tile's scores, of which one at least is seen, and leaves exponentials.
  __device__ void take(int head, const Shared& shared) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    float* const first = shared.scores + lane * kHeads + head;
    float* const second = first + kWarp * kHeads;
    const float now = fmaxf(largest, max_of_lanes(fmaxf(*first, *second)));
    const float factor = expf(largest - now);
    *first = expf(*first - now);
    *second = expf(*second - now);
    sum = sum * factor + sum_lanes(*first + *second);
    largest = now;
    if (lane == 0) shared.factors[head] = factor;
  }
};

/// A thread's values of each head.
template <int kChunks>
struct ValueSums {
  float of[kChunks][kHeads] = {};

  /// Adds a tile's values, whose rows begin `stride` apart, times the exponentials.
  template <typename T>
  __device__ void add(const PagedQueries& p, const T* values, int64_t stride, int begin, int end,
                      const Shared& shared) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int column = c * kThreads + static_cast<int>(threadIdx.x);
      if (column >= p.head_size_v) break;
#pragma unroll
      for (int h = 0; h < kHeads; ++h) of[c][h] *= shared.factors[h];
#pragma unroll 16
      for (int key = begin; key < end; ++key) {
        const float value = load<1>(values + key * stride + column)[0];
        const auto* const weights = reinterpret_cast<const float4*>(shared.scores + key * kHeads);
        const float4 low = weights[0];
        const float4 high = weights[1];
        of[c][0] += low.x * value;
        of[c][1] += low.y * value;
        of[c][2] += low.z * value;
        of[c][3] += low.w * value;
        of[c][4] += high.x * value;
        of[c][5] += high.y * value;
        of[c][6] += high.z * value;
        of[c][7] += high.w * value;
      }
    }
  }
};

/// The first row of the tile's page, from the tile's first key on.
__device__ int64_t first_row_of(const PagedQueries& p, int sequence, int tile) {
  const int page =
      p.page_table[int64_t{sequence} * p.pages_per_sequence + tile / static_cast<int>(kPageTokens)];
  if (page < 0 || page >= p.num_pages) fail("paged_attention: a page that is not there", page);
  return page * kPageTokens + tile % kPageTokens;
}

/// Of a row that is no sequence's.
template <typename T>
__device__ void store_zeros(const PagedQueries& p, const HeadGroup& heads) {
  const int64_t first = int64_t{blockIdx.x} * p.num_heads + heads.first;
  T* const o = static_cast<T*>(p.o) + first * p.head_size_v;
  for (int i = static_cast<int>(threadIdx.x); i < heads.count * p.head_size_v; i += kThreads)
    store(o + i, Floats<1>{});
  const int head = static_cast<int>(threadIdx.x);
  if (p.lse != nullptr && head < heads.count)
    p.lse[(heads.first + head) * p.num_rows + blockIdx.x] = 0;
}

/// The results, where a run has all keys.
template <typename T, int kChunks>
__device__ void store_whole(const PagedQueries& p, const HeadGroup& heads,
                            const Softmax (&softmax)[2], const ValueSums<kChunks>& sums,
                            const Shared& shared) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int head = warp + i * kWarps;
    if (threadIdx.x % kWarp != 0 || head >= heads.count) continue;
    shared.factors[head] = softmax[i].sum;
    if (p.lse != nullptr)
      p.lse[(heads.first + head) * p.num_rows + blockIdx.x] =
          softmax[i].largest + logf(softmax[i].sum);
  }
  __syncthreads();
  const int64_t first = int64_t{blockIdx.x} * p.num_heads + heads.first;
  T* const o = static_cast<T*>(p.o) + first * p.head_size_v;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int column = c * kThreads + static_cast<int>(threadIdx.x);
    if (column >= p.head_size_v) break;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h < heads.count)
        store(o + h * p.head_size_v + column, Floats<1>{{sums.of[c][h] / shared.factors[h]}});
    }
  }
}

template <typename T, int kWidth, int kChunks>
__global__ void __launch_bounds__(kThreads) attend(const PagedQueries p, int run_keys, bool fetch) {
  wait_for_earlier();
  let_next_begin();
  extern __shared__ float4 memory[];
  const Shared shared(reinterpret_cast<float*>(memory), p.head_size);
  const int run = static_cast<int>(blockIdx.z);
  const Query seen = part_of_run(find_query(p, static_cast<int>(blockIdx.x)), run, run_keys);
  const bool whole = gridDim.z == 1;
  const HeadGroup heads = head_group(p);
  if (seen.sequence == kNoSequence && whole) store_zeros<T>(p, heads);
  if (seen.sequence < 0 || seen.begin >= seen.end) return;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  load_queries<T>(p, heads, shared);
  // Values beyond a head's end, where rows are no whole vectors.
  const int cleared = p.head_size % 4 == 0 ? 0 : kKeys * shared.pitch;
  for (int i = static_cast<int>(threadIdx.x); i < cleared; i += kThreads) shared.keys[i] = 0;
  Softmax softmax[2];
  ValueSums<kChunks> sums;
  for (int tile = seen.begin / kKeys * kKeys; tile < seen.end; tile += kKeys) {
    const int begin = max(seen.begin - tile, 0);
    const int end = min(seen.end - tile, kKeys);
    const int64_t row = first_row_of(p, seen.sequence, tile) * p.num_kv_heads + heads.kv_head;
    const T* const values = static_cast<const T*>(p.values) + row * p.head_size_v;
    auto* const fetched = static_cast<T*>(shared.values);
    __syncthreads();
    if (fetch) fetch_values(p, values, begin, end, fetched);
    load_keys<T, kWidth>(p, static_cast<const T*>(p.keys) + row * p.head_size, begin, end, shared);
    __syncthreads();
    score(p, begin, end, shared);
    __syncthreads();
    softmax[0].take(warp, shared);
    softmax[1].take(warp + kWarps, shared);
    wait_copies<0>();
    __syncthreads();
    if (fetch) {
      sums.add(p, fetched, p.head_size_v, begin, end, shared);
    } else {
      sums.add(p, values, int64_t{p.num_kv_heads} * p.head_size_v, begin, end, shared);
    }
  }
  if (whole) return store_whole<T>(p, heads, softmax, sums, shared);
  const int64_t runs = gridDim.z;
  const int64_t first_place = int64_t{blockIdx.x} * p.num_heads + heads.first;
  const auto place = [&](int head) { return (first_place + head) * runs + run; };
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int head = warp + i * kWarps;
    if (threadIdx.x % kWarp == 0 && head < heads.count)
      p.statistics[place(head)] = {softmax[i].largest, softmax[i].sum};
  }
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int column = c * kThreads + static_cast<int>(threadIdx.x);
    if (column >= p.head_size_v) break;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h < heads.count) p.partials[place(h) * p.head_size_v + column] = sums.of[c][h];
    }
  }
}

/// Joins the runs of a token's query head.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    join_runs(const PagedQueries p, int run_keys, int num_runs) {
  wait_for_earlier();
  let_next_begin();
  const Query query = find_query(p, static_cast<int>(blockIdx.x));
  const int head = static_cast<int>(blockIdx.y);
  const int64_t place = int64_t{blockIdx.x} * p.num_heads + head;
  T* const o = static_cast<T*>(p.o) + place * p.head_size_v;
  float* const lse = p.lse == nullptr ? nullptr : p.lse + head * p.num_rows + blockIdx.x;
  if (query.sequence == kOfPrompt) return;
  if (query.sequence == kNoSequence) {
    for (int i = static_cast<int>(threadIdx.x); i < p.head_size_v; i += kThreads)
      store(o + i, Floats<1>{});
    if (lse != nullptr && threadIdx.x == 0) *lse = 0;
    return;
  }
  const int first = query.begin / run_keys;
  const int last = (query.end - 1) / run_keys;
  const float2* const statistics = p.statistics + place * num_runs;
  float largest = -INFINITY;
  for (int run = first; run <= last; ++run) largest = fmaxf(largest, statistics[run].x);
  float sum = 0;
  for (int run = first; run <= last; ++run)
    sum += statistics[run].y * expf(statistics[run].x - largest);
  for (int i = static_cast<int>(threadIdx.x); i < p.head_size_v; i += kThreads) {
    float value = 0;
    for (int run = first; run <= last; ++run)
      value += p.partials[(place * num_runs + run) * p.head_size_v + i] *
               expf(statistics[run].x - largest);
    store(o + i, Floats<1>{{value / sum}});
  }
  if (lse != nullptr && threadIdx.x == 0) *lse = largest + logf(sum);
}

/// Calls run.operator()<kChunks>() for values of that many blocks' threads.
template <typename Run>
void with_chunks(int head_size_v, Run run) {
  if (head_size_v <= kThreads) return run.template operator()<1>();
  if (head_size_v <= 2 * kThreads) return run.template operator()<2>();
  static_assert(kMostPagedHeadSizeV == 4 * kThreads);
  run.template operator()<4>();
}

}  // namespace

void launch_page_write(const PageRows& call, cudaStream_t stream) {
  const bool vectors =
      are_whole_vectors(call.dtype, call.width) && are_aligned(call.rows, call.cache);
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    launch_map(WriteMap<T, kWidth>{call.width, call.capacity, static_cast<const T*>(call.rows),
                                   call.to, static_cast<T*>(call.cache)},
               {.bound = call.num_rows}, call.width / kWidth, stream);
  });
}

void launch_paged_attention(const PagedQueries& given, cudaStream_t stream) {
  if (given.num_rows == 0) return;
  PagedQueries call = given;
  call.prompts_apart = call.num_rows >= kLeastPromptTokens && takes_prompts(call);
  if (call.prompts_apart) launch_paged_prompts(call, stream);
  const int num_runs = paged_runs(call.pages_per_sequence);
  const int run_keys = paged_run_pages(call.pages_per_sequence) * static_cast<int>(kPageTokens);
  const int shared_by = call.num_heads / call.num_kv_heads;
  const auto groups = static_cast<unsigned>(call.num_kv_heads * divide_up(shared_by, kHeads));
  const auto rows = static_cast<unsigned>(call.num_rows);
  const bool vectors = are_whole_vectors(call.dtype, call.head_size) && are_aligned(call.keys);
  if (num_runs > 0) {
    with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
      with_chunks(call.head_size_v, [&]<int kChunks>() {
        const auto kernel = attend<T, kWidth, kChunks>;
        const int64_t without = Shared::bytes(call.head_size);
        const int64_t with = without + kKeys * call.head_size_v * static_cast<int64_t>(sizeof(T));
        const bool fetch = with <= kMostSharedBytes &&
                           are_whole_vectors(call.dtype, call.head_size_v) &&
                           are_aligned(call.values);
        const int64_t shared_bytes = fetch ? with : without;
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   static_cast<int>(shared_bytes)));
        launch_early(kernel,
                     {{rows, groups, static_cast<unsigned>(num_runs)},
                      kThreads,
                      static_cast<size_t>(shared_bytes)},
                     stream, call, run_keys, fetch);
      });
    });
  }
  if (num_runs == 1) return;
  with_type(call.dtype, [&]<typename T>() {
    launch_early(join_runs<T>, {{rows, static_cast<unsigned>(call.num_heads)}, kThreads}, stream,
                 call, run_keys, num_runs);
  });
}

}  // namespace tessera::cuda
