// A block takes one token after another: it scores the keys that the token sees, finds the K-th
// largest score by its bits, eight at a time from the top, and writes what is above it, and of what
// equals it the last, in the order of their positions.
#include <algorithm>

#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/fail.cuh"
#include "ops/cuda/parts.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/float_word.h"
#include "ops/index_topk/index_topk_kernels.h"
#include "ops/paged_attention/kept_rows.cuh"
#include "ops/paged_attention/pages.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kKeys = 2;  // of a thread at once
constexpr int kBins = 256;

// The keys that a token sees: of the positions before `count`.
struct Seen {
  int count;
  int64_t first_row;
  const int32_t* pages;

  __device__ int64_t row(int position) const {
    if (pages == nullptr) return first_row + position;
    return static_cast<int64_t>(pages[position / kPageTokens]) * kPageTokens +
           position % kPageTokens;
  }
};

__device__ Seen find_entries(const IndexQueries& call, int64_t token) {
  const KeptToken own = KeptToken::find(call.entries, token);
  if (own.sequence < 0) return {0, 0, nullptr};
  const int count = (own.position + 1) / call.rate;
  if (call.entries.page_table != nullptr) {
    return {count, 0,
            call.entries.page_table +
                static_cast<int64_t>(own.sequence) * call.entries.pages_per_sequence};
  }
  const int64_t first = own.entry_row(call.entries, token, 0, call.rate);
  if (count > 0 && first + count > call.num_rows) fail("the last entry of a token", first + count);
  return {count, first, nullptr};
}

__device__ Seen find_seen(const IndexQueries& call, int64_t token) {
  if (call.rate > 0) return find_entries(call, token);
  if (call.cu_seqlens == nullptr) {
    const int length = call.lengths[0];
    if (length < call.num_tokens || length > call.num_rows) fail("cache_length", length);
    return {static_cast<int>(length - call.num_tokens + token + 1), 0, nullptr};
  }
  if (token >= call.cu_seqlens[call.num_sequences]) return {0, 0, nullptr};
  const int sequence = find_part(call.cu_seqlens, call.num_sequences, static_cast<int>(token));
  const int begin = call.cu_seqlens[sequence];
  if (call.page_table == nullptr) return {static_cast<int>(token - begin + 1), begin, nullptr};
  const int added = call.cu_seqlens[sequence + 1] - begin;
  const int length = call.lengths[sequence];
  if (length < added || length > call.longest) fail("the length of a sequence", length);
  return {static_cast<int>(length - added + token - begin + 1), 0,
          call.page_table + static_cast<int64_t>(sequence) * call.pages_per_sequence};
}

struct Shared {
  uint32_t histogram[kBins];
  uint32_t above[kWarps];  // of a warp's threads those whose score is above the K-th largest
  uint32_t equal[kWarps];
  uint32_t bin;
  uint32_t rest;
};

// A token's queries as floats, and its heads' weights; heads behind the last have zeros.
template <typename T>
__device__ void take_queries(const IndexQueries& call, int64_t token, int heads, float* q,
                             float* weights) {
  const int width = call.num_heads * call.head_size;
  const T* const from = static_cast<const T*>(call.q) + token * width;
  const T* const factors = static_cast<const T*>(call.weights) + token * call.num_heads;
  for (int i = threadIdx.x; i < heads * call.head_size; i += kThreads)
    q[i] = i < width ? static_cast<float>(from[i]) : 0.0F;
  for (int i = threadIdx.x; i < heads; i += kThreads)
    weights[i] = i < call.num_heads ? static_cast<float>(factors[i]) : 0.0F;
}

// Scores of the keys in hand; NaN goes on.
template <typename T, int kWidth>
__device__ void score_keys(const IndexQueries& call, int heads, const float* q,
                           const float* weights, const T* const (&keys)[kKeys],
                           float (&scores)[kKeys]) {
  for (int first = 0; first < heads; first += kIndexHeads) {
    float dots[kIndexHeads][kKeys] = {};
    for (int c = 0; c < call.head_size; c += kWidth) {
      Floats<kWidth> key[kKeys];
#pragma unroll
      for (int k = 0; k < kKeys; ++k) key[k] = load<kWidth>(keys[k] + c);
#pragma unroll
      for (int h = 0; h < kIndexHeads; ++h) {
        const Floats<kWidth> own = load<kWidth>(q + (first + h) * call.head_size + c);
#pragma unroll
        for (int k = 0; k < kKeys; ++k) {
#pragma unroll
          for (int i = 0; i < kWidth; ++i) dots[h][k] = fmaf(own[i], key[k][i], dots[h][k]);
        }
      }
    }
#pragma unroll
    for (int h = 0; h < kIndexHeads; ++h) {
#pragma unroll
      for (int k = 0; k < kKeys; ++k)
        scores[k] = fmaf(weights[first + h], dots[h][k] <= 0 ? 0.0F : dots[h][k], scores[k]);
    }
  }
}

template <typename T, int kWidth>
__device__ void score_seen(const IndexQueries& call, const Seen& seen, int heads, const float* q,
                           const float* weights, uint32_t* to) {
  for (int first = threadIdx.x; first < seen.count; first += kThreads * kKeys) {
    const T* keys[kKeys];
    float scores[kKeys] = {};
#pragma unroll
    for (int k = 0; k < kKeys; ++k) {
      const int64_t row = seen.row(min(first + k * kThreads, seen.count - 1));
      if (row < 0 || row >= call.num_rows) fail("a row of keys", row);
      keys[k] = static_cast<const T*>(call.keys) + row * call.head_size;
    }
    score_keys<T, kWidth>(call, heads, q, weights, keys, scores);
#pragma unroll
    for (int k = 0; k < kKeys; ++k) {
      const int position = first + k * kThreads;
      if (position < seen.count) to[position] = ordered_word(scores[k]);
    }
  }
}

// The K-th largest score, of how many equal ones there are, and of how many of them are chosen.
struct Border {
  uint32_t score;
  uint32_t equal;
  uint32_t taken;
};

__device__ Border find_border(const uint32_t* scores, int count, int top_k, Shared& shared) {
  Border border = {0, 0, static_cast<uint32_t>(top_k)};
  uint32_t known = 0;  // the bits that are
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < kBins; i += kThreads) shared.histogram[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += kThreads) {
      if ((scores[i] & known) == border.score)
        atomicAdd(&shared.histogram[scores[i] >> shift & (kBins - 1)], 1U);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      uint32_t rest = border.taken;
      uint32_t bin = kBins - 1;
      for (; bin > 0 && shared.histogram[bin] < rest; --bin) rest -= shared.histogram[bin];
      shared.bin = bin;
      shared.rest = rest;
    }
    __syncthreads();
    border.score |= shared.bin << shift;
    border.taken = shared.rest;
    border.equal = shared.histogram[shared.bin];
    known |= (kBins - 1U) << shift;
    __syncthreads();
  }
  return border;
}

__device__ void write_chosen(const Seen& seen, const uint32_t* scores, const Border& border,
                             Shared& shared, int32_t* to) {
  const uint32_t left_out = border.equal - border.taken;  // the first of the equal ones
  const uint32_t before_lane = (1U << threadIdx.x % 32) - 1;
  uint32_t above_before = 0;
  uint32_t equal_before = 0;
  for (int first = 0; first < seen.count; first += kThreads) {
    const int position = first + static_cast<int>(threadIdx.x);
    const bool is_there = position < seen.count;
    const bool above = is_there && scores[position] > border.score;
    const bool equal = is_there && scores[position] == border.score;
    const uint32_t above_lanes = __ballot_sync(0xFFFFFFFF, above);
    const uint32_t equal_lanes = __ballot_sync(0xFFFFFFFF, equal);
    if (threadIdx.x % 32 == 0) {
      shared.above[threadIdx.x / 32] = __popc(above_lanes);
      shared.equal[threadIdx.x / 32] = __popc(equal_lanes);
    }
    __syncthreads();
    uint32_t own_above = above_before + __popc(above_lanes & before_lane);
    uint32_t own_equal = equal_before + __popc(equal_lanes & before_lane);
    for (int warp = 0; warp < kWarps; ++warp) {
      if (warp < static_cast<int>(threadIdx.x) / 32) {
        own_above += shared.above[warp];
        own_equal += shared.equal[warp];
      }
      above_before += shared.above[warp];
      equal_before += shared.equal[warp];
    }
    if (above || (equal && own_equal >= left_out)) {
      const uint32_t equal_taken = own_equal > left_out ? own_equal - left_out : 0;
      to[own_above + equal_taken] = static_cast<int32_t>(seen.row(position));
    }
    __syncthreads();
  }
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads) choose_keys(const __grid_constant__ IndexQueries call) {
  extern __shared__ __align__(16) float queries[];
  __shared__ Shared shared;
  wait_for_earlier();
  const int heads = static_cast<int>(divide_up(call.num_heads, kIndexHeads)) * kIndexHeads;
  float* const weights = queries + heads * call.head_size;
  uint32_t* const scores = call.scores + blockIdx.x * call.longest;
  for (int64_t token = blockIdx.x; token < call.num_tokens; token += gridDim.x) {
    const Seen seen = find_seen(call, token);
    int32_t* const to = call.chosen + token * call.top_k;
    if (seen.count <= call.top_k) {
      for (int i = threadIdx.x; i < call.top_k; i += kThreads)
        to[i] = i < seen.count ? static_cast<int32_t>(seen.row(i)) : -1;
      continue;
    }
    take_queries<T>(call, token, heads, queries, weights);
    __syncthreads();
    score_seen<T, kWidth>(call, seen, heads, queries, weights, scores);
    __syncthreads();
    write_chosen(seen, scores, find_border(scores, seen.count, call.top_k, shared), shared, to);
  }
}

template <typename T, int kWidth>
void launch(const IndexQueries& call, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(std::min(call.num_tokens, kMostIndexBlocks));
  const int64_t bytes = index_shared_bytes(call.num_heads, call.head_size);
  check(cudaFuncSetAttribute(choose_keys<T, kWidth>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(kMostIndexSharedBytes)));
  launch_early(choose_keys<T, kWidth>, {blocks, kThreads, static_cast<size_t>(bytes)}, stream,
               call);
}

}  // namespace

void launch_index_topk(const IndexQueries& call, cudaStream_t stream) {
  if (call.num_tokens == 0) return;
  const bool vectors = call.head_size % 8 == 0 && are_aligned(call.keys);
  with_vectors(call.dtype, vectors,
               [&]<typename T, int kWidth>() { launch<T, kWidth>(call, stream); });
}

}  // namespace tessera::cuda
