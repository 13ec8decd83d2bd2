// Who chose which keys: a list of tokens for each 64 neighbouring ones, dealt out to thread blocks
// as evenly as a bounded number of them allows, and the sum of what these leave.
#include <algorithm>

#include "ops/attention/attention_sequence_list.cuh"
#include "ops/attention/large_heads.h"
#include "ops/cuda/check.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/fail.cuh"
#include "ops/cuda/vector.cuh"

namespace tessera::cuda::large_heads {
namespace {

using attention::kWarp;
using attention::sum_up_to_lane;

constexpr int kMarkThreads = 256;
constexpr int kListThreads = 256;
constexpr int kPlanThreads = 1024;
constexpr int kAddThreads = 256;
constexpr int kAddRows = 8;        // of a block
constexpr int kLeastOfChunk = 64;  // tokens
constexpr int kWantedBlocks = 256;
constexpr int kMostParts = 8;

/// Bits come in any order, to the same words.
__global__ void __launch_bounds__(kMarkThreads) mark_kernel(const __grid_constant__ Params params) {
  wait_for_earlier();
  const int64_t num_tokens = params.heads.num_rows;
  const int64_t i = int64_t{blockIdx.x} * kMarkThreads + threadIdx.x;
  if (i >= num_tokens * params.top_k) return;
  const int row = params.chosen[i];
  if (row < 0) return;
  if (row >= params.num_rows) fail("a chosen row", row);
  uint64_t* const mask = &params.choosers.masks[row / kRows * num_tokens + i / params.top_k];
  atomicOr(reinterpret_cast<unsigned long long*>(mask), 1ULL << row % kRows);
}

/// A call of fail() in the kernels that multiply would keep their products from overlapping.
__global__ void __launch_bounds__(kMarkThreads)
    check_kernel(const __grid_constant__ Params params) {
  wait_for_earlier();
  const int64_t i = int64_t{blockIdx.x} * kMarkThreads + threadIdx.x;
  if (i < params.heads.num_rows * params.top_k && params.chosen[i] >= params.num_rows)
    fail("a chosen row", params.chosen[i]);
}

/// A block lists the tokens of one tile.
__global__ void __launch_bounds__(kListThreads) list_kernel(const __grid_constant__ Params params) {
  constexpr int kWarps = kListThreads / kWarp;
  __shared__ int of_warps[kWarps];
  wait_for_earlier();
  const int num_tokens = static_cast<int>(params.heads.num_rows);
  const uint64_t* const masks = params.choosers.masks + int64_t{blockIdx.x} * num_tokens;
  int* const tokens = params.choosers.tokens + int64_t{blockIdx.x} * num_tokens;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  int before = 0;
  for (int first = 0; first < num_tokens; first += kListThreads) {
    const int token = first + static_cast<int>(threadIdx.x);
    const unsigned those = __ballot_sync(~0U, token < num_tokens && masks[token] != 0);
    if (lane == 0) of_warps[warp] = __popc(those);
    __syncthreads();
    int place = before + __popc(those & ((1U << lane) - 1));
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) place += of_warps[w];
      before += of_warps[w];
    }
    if ((those >> lane & 1) != 0) tokens[place] = token;
    __syncthreads();
  }
  if (threadIdx.x == 0) params.choosers.counts[blockIdx.x] = before;
}

__device__ int num_chunks_of(int count, int size) {
  return max((count + size - 1) / size, 1);
}

/// The least size of chunks, a power of two, that gives at most kMoreBlocks more than there are
/// tiles.
__device__ int chunk_size(const Choosers& choosers, int num_tiles) {
  __shared__ int total;
  for (int size = kLeastOfChunk;; size *= 2) {
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    int own = 0;
    for (int tile = threadIdx.x; tile < num_tiles; tile += kPlanThreads)
      own += num_chunks_of(choosers.counts[tile], size);
    if (own > 0) atomicAdd(&total, own);
    __syncthreads();
    const int all = total;
    __syncthreads();
    if (all <= num_tiles + kMoreBlocks) return size;
  }
}

/// One block. Warp 0 places the tiles' chunks and slots one after the other.
__global__ void __launch_bounds__(kPlanThreads) plan_kernel(Choosers choosers, int num_tiles) {
  wait_for_earlier();
  const int size = chunk_size(choosers, num_tiles);
  if (threadIdx.x >= kWarp) return;
  const int lane = static_cast<int>(threadIdx.x);
  int first_chunk = 0;
  int first_slot = 0;
  for (int first = 0; first < num_tiles; first += kWarp) {
    const int tile = first + lane;
    const int count = tile < num_tiles ? choosers.counts[tile] : 0;
    const int chunks = tile < num_tiles ? num_chunks_of(count, size) : 0;
    const int slots = chunks > 1 ? chunks : 0;
    const int chunks_up_to = sum_up_to_lane(chunks);
    const int slots_up_to = sum_up_to_lane(slots);
    const int slot = first_slot + slots_up_to - slots;
    if (tile < num_tiles) choosers.slots[tile] = make_int2(slot, slots);
    for (int i = 0; i < chunks; ++i) {
      choosers.chunks[first_chunk + chunks_up_to - chunks + i] = {
          .tile = tile,
          .first = i * size,
          .count = min(size, count - i * size),
          .slot = slots > 0 ? slot + i : -1};
    }
    first_chunk += __shfl_sync(~0U, chunks_up_to, kWarp - 1);
    first_slot += __shfl_sync(~0U, slots_up_to, kWarp - 1);
  }
  if (lane == 0) *choosers.num_chunks = first_chunk;
}

constexpr int kWidth = 4;  // values of a thread at a time; heads have whole ones

/// The sum of `count` parts that are so far apart.
__device__ __forceinline__ Floats<kWidth> add_parts(const float* first, int64_t apart, int count) {
  Floats<kWidth> sum = load<kWidth>(first);
  for (int part = 1; part < count; ++part) {
    const Floats<kWidth> own = load<kWidth>(first + part * apart);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum[i] += own[i];
  }
  return sum;
}

/// A block for each tile, kAddRows of its rows and key-value head.
__global__ void __launch_bounds__(kAddThreads)
    add_slots_kernel(const __grid_constant__ Params params, __nv_bfloat16* grad, int size) {
  wait_for_earlier();
  const int tile = static_cast<int>(blockIdx.x);
  const int kv_head = static_cast<int>(blockIdx.z);
  const int2 slots = params.choosers.slots[tile];
  if (slots.y == 0) return;
  const int first_row = static_cast<int>(blockIdx.y) * kAddRows;
  const int64_t slot_size = int64_t{kRows} * size;
  const float* const sums = params.sums +
                            (int64_t{kv_head} * params.choosers.num_slots + slots.x) * slot_size +
                            first_row * size;
  for (int i = static_cast<int>(threadIdx.x) * kWidth; i < kAddRows * size;
       i += kAddThreads * kWidth) {
    const int row = tile * kRows + first_row + i / size;
    if (row >= params.num_rows) return;
    const int64_t to = (int64_t{row} * params.heads.num_kv_heads + kv_head) * size + i % size;
    store(grad + to, add_parts(sums + i, slot_size, slots.y));
  }
}

__global__ void __launch_bounds__(kAddThreads)
    add_parts_kernel(const __grid_constant__ Params params, __nv_bfloat16* grad, int64_t count) {
  wait_for_earlier();
  const int64_t i = (int64_t{blockIdx.x} * kAddThreads + threadIdx.x) * kWidth;
  if (i < count) store(grad + i, add_parts(params.sums + i, count, params.num_parts));
}

}  // namespace

void launch_check_choice(const Params& params, cudaStream_t stream) {
  const int64_t count = params.heads.num_rows * params.top_k;
  if (count > 0)
    launch_early(check_kernel,
                 {static_cast<unsigned>(divide_up(count, kMarkThreads)), kMarkThreads}, stream,
                 params);
}

int num_parts(int64_t num_items, int group) {
  return static_cast<int>(std::clamp<int64_t>(kWantedBlocks / std::max<int64_t>(num_items, 1), 1,
                                              std::min<int64_t>(group, kMostParts)));
}

int64_t most_slots(int64_t num_tokens, int64_t num_rows) {
  const int64_t of_tile = (num_tokens + kLeastOfChunk - 1) / kLeastOfChunk;
  return of_tile < 2 ? 0 : std::min<int64_t>(kMostSlots, num_key_tiles(num_rows) * of_tile);
}

void launch_list_choosers(const Params& params, cudaStream_t stream) {
  const Choosers& choosers = params.choosers;
  const int64_t num_tokens = params.heads.num_rows;
  const int64_t num_tiles = num_key_tiles(params.num_rows);
  const int64_t marks = num_tokens * params.top_k;
  check(cudaMemsetAsync(choosers.masks, 0, num_tiles * num_tokens * sizeof(uint64_t), stream));
  if (marks > 0)
    launch_early(mark_kernel, {static_cast<unsigned>(divide_up(marks, kMarkThreads)), kMarkThreads},
                 stream, params);
  launch_early(list_kernel, {static_cast<unsigned>(num_tiles), kListThreads}, stream, params);
  launch_early(plan_kernel, {1, kPlanThreads}, stream, choosers, static_cast<int>(num_tiles));
}

void launch_add_sums(const Params& params, void* grad, int size, cudaStream_t stream) {
  auto* const to = static_cast<__nv_bfloat16*>(grad);
  if (params.chosen != nullptr) {
    if (params.choosers.num_slots == 0) return;
    const dim3 blocks(static_cast<unsigned>(num_key_tiles(params.num_rows)), kRows / kAddRows,
                      static_cast<unsigned>(params.heads.num_kv_heads));
    launch_early(add_slots_kernel, {blocks, kAddThreads}, stream, params, to, size);
  } else if (params.num_parts > 1) {
    const int64_t count = int64_t{params.num_rows} * params.heads.num_kv_heads * size;
    const auto blocks = static_cast<unsigned>(divide_up(count, kAddThreads * kWidth));
    launch_early(add_parts_kernel, {blocks, kAddThreads}, stream, params, to, count);
  }
}

}  // namespace tessera::cuda::large_heads
