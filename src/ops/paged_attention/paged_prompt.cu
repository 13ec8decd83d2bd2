// Attention of prompts over pages of keys and values, on the tensor cores (FlashAttention-2: Dao
// 2023). The rows of a block are new tokens times the query heads that share a key-value head, so
// that each key is read once for all of these. A warp has 16 rows, keys come in tiles of 64, the
// next tile while one is multiplied.
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/fail.cuh"
#include "ops/cuda/ptx/async_copy.cuh"
#include "ops/cuda/ptx/fragment_product.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/paged_attention/paged_attention_kernels.h"
#include "ops/paged_attention/pages.h"

namespace tessera::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kWarpRows = 16;
constexpr int kRows = kWarps * kWarpRows;
constexpr int kKeys = 64;
constexpr float kLog2E = 1.4426950408889634F;
static_assert(kPageTokens % kKeys == 0);

/// Rows of a sequence that a block takes.
struct PromptTile {
  int sequence = -1;
  int idx = 0;
};

/// By the block: the tile of this number, of all sequences that are read as prompts.
__device__ PromptTile find_tile(const PagedQueries& p, int wanted, int shared_by) {
  __shared__ PromptTile found;
  __shared__ int of_warps[kWarps];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  if (threadIdx.x == 0) found = {};
  __syncthreads();
  int before = 0;
  for (int first = 0; first < p.num_sequences; first += kThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    const int count = i < p.num_sequences ? p.cu_seqlens[i + 1] - p.cu_seqlens[i] : 0;
    const int tiles = count < kLeastPromptTokens ? 0 : (count * shared_by + kRows - 1) / kRows;
    int end = tiles;
    for (int step = 1; step < kWarp; step *= 2) {
      const int below = __shfl_up_sync(~0U, end, step);
      if (lane >= step) end += below;
    }
    if (lane == kWarp - 1) of_warps[warp] = end;
    __syncthreads();
    end += before;
    for (int other = 0; other < kWarps; ++other) {
      if (other < warp) end += of_warps[other];
      before += of_warps[other];
    }
    if (wanted < end && wanted >= end - tiles) found = {i, wanted - (end - tiles)};
    __syncthreads();
  }
  return found;
}

/// The rows of a tile: tokens of a sequence times query heads.
struct Rows {
  int shared_by;
  int first;           // row of the tile, among the sequence's
  int count;           // rows of the sequence
  int first_token;     // of the sequence, in the batch
  int first_position;  // of its first new token
  int64_t window;
  int64_t chunk;

  __device__ bool is_there(int row) const { return first + row < count; }
  __device__ int token(int row) const { return (first + row) / shared_by; }
  __device__ int head(int row) const { return (first + row) % shared_by; }
  /// The last key that a row sees, and the first.
  __device__ int last_key(int row) const { return first_position + token(row); }
  __device__ int first_key(int row) const { return first_seen_key(last_key(row), window, chunk); }
  __device__ int last_row() const { return min(kRows, count - first) - 1; }
};

/// Lines padded so that they begin in different banks.
template <int kHead>
struct Shared {
  static constexpr int kStride = kHead + 8;
  BFloat16 q[kRows * kStride];
  BFloat16 keys[2][kKeys * kStride];
  BFloat16 values[2][kKeys * kStride];
};

/// By the block: lines of a head, of which those are zeros that are not there.
template <int kHead, int kLines, typename From>
__device__ void load_lines(BFloat16* to, const BFloat16* any, From from) {
  constexpr int kVectors = kHead / 8;
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kLines * kVectors; i += kThreads) {
    const int line = i / kVectors;
    const int at = i % kVectors * 8;
    const BFloat16* const source = from(line);
    copy_async_or_zero(to + line * Shared<kHead>::kStride + at,
                       source == nullptr ? any : source + at, source != nullptr);
  }
}

/// Two rows of a warp, those of a thread's sums, and its part of a tile's scores.
template <int kHead>
struct Attention {
  static constexpr int kStride = Shared<kHead>::kStride;
  static constexpr int kSteps = kHead / 16;

  uint32_t q[kSteps][4];
  float sums[kHead / 8][4] = {};
  float largest[2] = {-INFINITY, -INFINITY};
  float total[2] = {};

  static __device__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  static __device__ int first_row() { return static_cast<int>(threadIdx.x) / kWarp * kWarpRows; }

  __device__ void take_queries(const Shared<kHead>& shared) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
      load_fragment_rows(q[k], shared.q + first_row() * kStride + k * 16, kStride);
  }
  __device__ void score(float (&scores)[kKeys / 8][4], const BFloat16* keys) const {
#pragma unroll
    for (int n = 0; n < kKeys; n += 16) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        uint32_t b[4];
        load_fragment_columns(b, keys + n * kStride + k * 16, kStride);
        fragment_product(scores[n / 8], q[k], b[0], b[1]);
        fragment_product(scores[n / 8 + 1], q[k], b[2], b[3]);
      }
    }
  }
  /// Hides keys that a row does not see.
  __device__ void mask(float (&scores)[kKeys / 8][4], const Rows& rows, int first_key) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row() + lane() / 4 + half * 8;
      const int begin = rows.first_key(row) - first_key;
      const int last = rows.last_key(row) - first_key;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int key = n * 8 + lane() % 4 * 2 + i;
          if (key < begin || key > last) scores[n][half * 2 + i] = -INFINITY;
        }
      }
    }
  }
  /// Makes exponentials of the scores.
  __device__ void soften(float (&scores)[kKeys / 8][4], float scale_log2) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float now = largest[half];
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
        now = fmaxf(now, fmaxf(scores[n][half * 2], scores[n][half * 2 + 1]));
      now = fmaxf(now, __shfl_xor_sync(~0U, now, 1));
      now = fmaxf(now, __shfl_xor_sync(~0U, now, 2));
      // A row may see no key of the first tiles of its block.
      const float base = now == -INFINITY ? 0.0F : now * scale_log2;
      const float factor = exp2f(largest[half] * scale_log2 - base);
      largest[half] = now;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = scores[n][half * 2 + i];
          score = exp2f(score * scale_log2 - base);
          sum += score;
        }
      }
      total[half] = total[half] * factor + sum;
#pragma unroll
      for (auto& column : sums) {
        column[half * 2] *= factor;
        column[half * 2 + 1] *= factor;
      }
    }
  }
  __device__ void add_values(const float (&weights)[kKeys / 8][4], const BFloat16* values) {
#pragma unroll
    for (int k = 0; k < kKeys; k += 16) {
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const pair = weights[k / 8 + i / 2] + i % 2 * 2;
        const __nv_bfloat162 both = __floats2bfloat162_rn(pair[0], pair[1]);
        a[i] = *reinterpret_cast<const uint32_t*>(&both);
      }
#pragma unroll
      for (int n = 0; n < kHead; n += 16) {
        uint32_t b[4];
        load_fragment_columns_across(b, values + k * kStride + n, kStride);
        fragment_product(sums[n / 8], a, b[0], b[1]);
        fragment_product(sums[n / 8 + 1], a, b[2], b[3]);
      }
    }
  }
  __device__ void store(const PagedQueries& p, const Rows& rows, int kv_head) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float all = total[half];
      all += __shfl_xor_sync(~0U, all, 1);
      all += __shfl_xor_sync(~0U, all, 2);
      const int row = first_row() + lane() / 4 + half * 8;
      if (!rows.is_there(row)) continue;
      const int64_t token = rows.first_token + rows.token(row);
      const int head = kv_head * rows.shared_by + rows.head(row);
      auto* const o =
          static_cast<BFloat16*>(p.o) + (token * p.num_heads + head) * kHead + lane() % 4 * 2;
#pragma unroll
      for (int n = 0; n < kHead / 8; ++n)
        *reinterpret_cast<__nv_bfloat162*>(o + n * 8) =
            __floats2bfloat162_rn(sums[n][half * 2] / all, sums[n][half * 2 + 1] / all);
      if (p.lse != nullptr && lane() % 4 == 0)
        p.lse[head * p.num_rows + token] = largest[half] * p.scale + logf(all);
    }
  }
};

template <int kHead>
__global__ void __launch_bounds__(kThreads, 2) attend_prompts(const PagedQueries p) {
  wait_for_earlier();
  let_next_begin();
  extern __shared__ uint4 memory[];
  auto& shared = *reinterpret_cast<Shared<kHead>*>(memory);
  const int shared_by = p.num_heads / p.num_kv_heads;
  const PromptTile tile = find_tile(p, static_cast<int>(blockIdx.x), shared_by);
  if (tile.sequence < 0) return;
  const int kv_head = static_cast<int>(blockIdx.y);
  const int first_token = p.cu_seqlens[tile.sequence];
  const int count = p.cu_seqlens[tile.sequence + 1] - first_token;
  const int length = p.lengths[tile.sequence];
  if (count > length || length > p.pages_per_sequence * static_cast<int>(kPageTokens))
    fail("paged_attention: a sequence shorter than its new tokens, or longer than its pages",
         length);
  const Rows rows{shared_by, tile.idx * kRows, count * shared_by, first_token, length - count,
                  p.window,  p.chunk};
  const auto* const q = static_cast<const BFloat16*>(p.q);
  load_lines<kHead, kRows>(shared.q, q, [&](int row) -> const BFloat16* {
    if (!rows.is_there(row)) return nullptr;
    const int64_t token = first_token + rows.token(row);
    return q + (token * p.num_heads + kv_head * shared_by + rows.head(row)) * kHead;
  });
  const int end = rows.last_key(rows.last_row()) + 1;
  const int begin = rows.first_key(0) / kKeys * kKeys;
  const int32_t* const pages = p.page_table + int64_t{tile.sequence} * p.pages_per_sequence;
  const auto load_tile = [&](int first_key, int stage) {
    if (first_key < end) {
      const int page = pages[first_key / static_cast<int>(kPageTokens)];
      if (page < 0 || page >= p.num_pages) fail("paged_attention: a page that is not there", page);
      const int64_t row = page * kPageTokens + first_key % static_cast<int>(kPageTokens);
      const auto of = [&](const void* cache) {
        const auto* const lines =
            static_cast<const BFloat16*>(cache) + (row * p.num_kv_heads + kv_head) * kHead;
        return [&p, lines, left = end - first_key](int key) -> const BFloat16* {
          return key < left ? lines + int64_t{key} * p.num_kv_heads * kHead : nullptr;
        };
      };
      load_lines<kHead, kKeys>(shared.keys[stage], q, of(p.keys));
      load_lines<kHead, kKeys>(shared.values[stage], q, of(p.values));
    }
    commit_copies();
  };
  load_tile(begin, 0);
  Attention<kHead> attention;
  for (int first_key = begin, stage = 0; first_key < end; first_key += kKeys, stage ^= 1) {
    load_tile(first_key + kKeys, stage ^ 1);
    wait_copies<1>();
    __syncthreads();
    if (first_key == begin) attention.take_queries(shared);
    float scores[kKeys / 8][4] = {};
    attention.score(scores, shared.keys[stage]);
    const bool all_seen =
        first_key + kKeys - 1 <= rows.last_key(0) && first_key >= rows.first_key(rows.last_row());
    if (!all_seen) attention.mask(scores, rows, first_key);
    attention.soften(scores, p.scale * kLog2E);
    attention.add_values(scores, shared.values[stage]);
    __syncthreads();
  }
  attention.store(p, rows, kv_head);
}

template <int kHead>
void launch(const PagedQueries& call, cudaStream_t stream) {
  const int64_t shared_by = call.num_heads / call.num_kv_heads;
  // Each sequence has one tile at most that is not full.
  const int64_t tiles = call.num_rows * shared_by / kRows +
                        std::min<int64_t>(call.num_sequences, call.num_rows / kLeastPromptTokens);
  if (tiles == 0) return;
  const auto kernel = attend_prompts<kHead>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(sizeof(Shared<kHead>))));
  launch_early(kernel,
               {{static_cast<unsigned>(tiles), static_cast<unsigned>(call.num_kv_heads)},
                kThreads,
                sizeof(Shared<kHead>)},
               stream, call);
}

}  // namespace

bool takes_prompts(const PagedQueries& call) {
  return call.dtype == DType::kBF16 && call.head_size == call.head_size_v &&
         (call.head_size == 64 || call.head_size == 128) &&
         are_aligned(call.q, call.keys, call.values, call.o);
}

void launch_paged_prompts(const PagedQueries& call, cudaStream_t stream) {
  call.head_size == 64 ? launch<64>(call, stream) : launch<128>(call, stream);
}

}  // namespace tessera::cuda
