// The gradient of a table: a sum over each row's tokens, without atomics on floats. First the
// positions of every row's tokens are listed in order. Of each list, segments of kSegment positions
// are then summed side by side: the only one of a row into the accumulator, those of a row with
// several into scratch memory, from where they are added in order at the end. Where the lists lie
// in memory is a matter of chance, what is added in which order is not.
#include <algorithm>

#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/short_kernel.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/embedding/embedding_device.cuh"

namespace tessera::cuda {
namespace {

constexpr int kSegment = 32;
constexpr int kListThreads = 1024;
constexpr int kIdsOfThread = 4;
constexpr int kTile = kListThreads * kIdsOfThread;  // tokens looked at together
constexpr int kMaxSlots = 4096;                     // rows of a block
constexpr int kMinLists = 128;                      // blocks
constexpr int kSegmentThreads = 256;
constexpr int kSegmentBlocks = 4;  // of an SM
constexpr int kBatch = 4;          // rows that a thread loads at once

struct Segment {
  int row;
  int begin;  // in the list of positions
  int count;
  int partial;  // -1: the row's only segment
};

struct SplitRow {
  int row;
  int first_partial;
  int num_partials;
};

/// What blocks have taken of the lists so far.
struct Taken {
  int positions;
  int segments;
  int partials;
  int split_rows;
};

/// The parts of scratch memory.
struct Scratch {
  Taken* taken;
  int* positions;        // [tokens]
  Segment* segments;     // [tokens]
  SplitRow* split_rows;  // [tokens / kSegment + 1]
  float* partials;       // [2 · (tokens / kSegment) + 2, hidden]
  int64_t num_bytes;

  Scratch(void* memory, int64_t num_tokens, int64_t hidden) {
    auto* at = static_cast<char*>(memory);
    const int64_t splits = num_tokens / kSegment + 1;
    const auto take = [&](auto*& part, int64_t count) {
      part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(at);
      at += divide_up(count * static_cast<int64_t>(sizeof(*part)), 64) * 64;
    };
    take(taken, 1);
    take(positions, num_tokens);
    take(segments, num_tokens);
    take(split_rows, splits);
    take(partials, 2 * splits * hidden);
    num_bytes = at - static_cast<char*>(memory);
  }
};

struct ListParams {
  TokenRows tokens;
  int64_t padding_token;
  int lists_shift;  // log2 of the number of blocks
  int num_slots;
  Scratch scratch;

  /// The block's slot for a token's row, -1 where it is another block's or takes no gradient.
  __device__ int slot_of(int32_t token) const {
    const int64_t row = row_of(tokens, token);
    const int64_t mask = (int64_t{1} << lists_shift) - 1;
    if (row < 0 || token == padding_token || (row & mask) != blockIdx.x) return -1;
    return static_cast<int>(row >> lists_shift);
  }
  __device__ int row_at(int slot) const {
    return (slot << lists_shift) | static_cast<int>(blockIdx.x);
  }
};

/// Calls use(i, token) for the thread's consecutive tokens of a tile.
template <typename Use>
__device__ __forceinline__ void for_own_tokens(const int32_t* tokens, int64_t tile, int64_t count,
                                               Use use) {
  const int64_t first = tile * kTile + threadIdx.x * kIdsOfThread;
  int32_t ids[kIdsOfThread];
  const bool whole = first + kIdsOfThread <= count;
  if (whole && (reinterpret_cast<uintptr_t>(tokens) & 15) == 0) {
    *reinterpret_cast<int4*>(ids) = *reinterpret_cast<const int4*>(tokens + first);
  } else {
    for (int i = 0; i < kIdsOfThread; ++i)
      if (first + i < count) ids[i] = tokens[first + i];
  }
#pragma unroll
  for (int i = 0; i < kIdsOfThread; ++i)
    if (first + i < count) use(i, ids[i]);
}

/// The sum over earlier threads, and the block's in `total`. `shared` has 33 ints.
__device__ __forceinline__ int exclusive_sum(int x, int* shared, int* total) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  int inclusive = x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(0xFFFFFFFF, inclusive, step);
    if (lane >= step) inclusive += before;
  }
  __syncthreads();
  if (lane == 31) shared[warp] = inclusive;
  __syncthreads();
  int warps = shared[lane];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(0xFFFFFFFF, warps, step);
    if (lane >= step) warps += before;
  }
  *total = __shfl_sync(0xFFFFFFFF, warps, 31);
  const int earlier = __shfl_sync(0xFFFFFFFF, warps, warp > 0 ? warp - 1 : 0);
  return inclusive - x + (warp > 0 ? earlier : 0);
}

struct ListShared {
  int counts[kMaxSlots];  // of tokens; then where the slot's next position goes
  int tile_positions[kTile];
  short tile_slots[kTile];
  int sums[33];
  Taken base;
};

__device__ __forceinline__ int segments_of(int count) {
  return (count + kSegment - 1) / kSegment;
}

/// Turns the slots' counts into the places of their lists, and describes their segments.
__device__ void lay_out_lists(const ListParams& p, ListShared& shared) {
  constexpr int kOwn = kMaxSlots / kListThreads;
  const int first = static_cast<int>(threadIdx.x) * kOwn;
  Taken own = {};
  for (int slot = first; slot < first + kOwn && slot < p.num_slots; ++slot) {
    const int count = shared.counts[slot];
    const int segments = segments_of(count);
    own.positions += count;
    own.segments += segments;
    own.partials += segments > 1 ? segments : 0;
    own.split_rows += segments > 1;
  }
  Taken at = {};
  Taken all = {};
  at.positions = exclusive_sum(own.positions, shared.sums, &all.positions);
  at.segments = exclusive_sum(own.segments, shared.sums, &all.segments);
  at.partials = exclusive_sum(own.partials, shared.sums, &all.partials);
  at.split_rows = exclusive_sum(own.split_rows, shared.sums, &all.split_rows);
  if (threadIdx.x == 0) {
    Taken* taken = p.scratch.taken;
    shared.base = {
        atomicAdd(&taken->positions, all.positions), atomicAdd(&taken->segments, all.segments),
        atomicAdd(&taken->partials, all.partials), atomicAdd(&taken->split_rows, all.split_rows)};
  }
  __syncthreads();
  at.positions += shared.base.positions;
  at.segments += shared.base.segments;
  at.partials += shared.base.partials;
  at.split_rows += shared.base.split_rows;
  for (int slot = first; slot < first + kOwn && slot < p.num_slots; ++slot) {
    const int count = shared.counts[slot];
    const int segments = segments_of(count);
    const int row = p.row_at(slot);
    for (int s = 0; s < segments; ++s) {
      const int begin = s * kSegment;
      p.scratch.segments[at.segments++] = {row, at.positions + begin,
                                           count - begin < kSegment ? count - begin : kSegment,
                                           segments > 1 ? at.partials + s : -1};
    }
    if (segments > 1) {
      p.scratch.split_rows[at.split_rows++] = {row, at.partials, segments};
      at.partials += segments;
    }
    shared.counts[slot] = at.positions;
    at.positions += count;
  }
  __syncthreads();
}

/// Adds a tile's tokens to their lists, in order: one warp takes 32 at a time.
__device__ void append_tile(const ListParams& p, ListShared& shared, int count) {
  const int lane = static_cast<int>(threadIdx.x);
  for (int first = 0; first < count; first += 32) {
    const bool holds = first + lane < count;
    const int slot = holds ? shared.tile_slots[first + lane] : -1;
    const unsigned same = __match_any_sync(0xFFFFFFFF, slot);
    const int rank = __popc(same & ((1U << lane) - 1));
    const int begin = holds ? shared.counts[slot] : 0;
    __syncwarp();
    if (holds) {
      p.scratch.positions[begin + rank] = shared.tile_positions[first + lane];
      if (rank == 0) shared.counts[slot] = begin + __popc(same);
    }
    __syncwarp();
  }
}

/// Block b lists the positions of the rows that are b modulo the number of blocks.
__global__ void __launch_bounds__(kListThreads) list_tokens(const __grid_constant__ ListParams p) {
  wait_for_earlier();
  let_next_begin_if_short();
  __shared__ ListShared shared;
  const int64_t count = p.tokens.rows.in_use();
  const int64_t tiles = divide_up(count, kTile);
  for (int slot = static_cast<int>(threadIdx.x); slot < p.num_slots; slot += kListThreads)
    shared.counts[slot] = 0;
  __syncthreads();
#pragma unroll 4
  for (int64_t tile = 0; tile < tiles; ++tile) {
    for_own_tokens(p.tokens.tokens, tile, count, [&](int /*i*/, int32_t token) {
      const int slot = p.slot_of(token);
      if (slot >= 0) atomicAdd(&shared.counts[slot], 1);
    });
  }
  __syncthreads();
  lay_out_lists(p, shared);
  for (int64_t tile = 0; tile < tiles; ++tile) {
    int slots[kIdsOfThread] = {-1, -1, -1, -1};
    int own = 0;
    for_own_tokens(p.tokens.tokens, tile, count, [&](int i, int32_t token) {
      slots[i] = p.slot_of(token);
      own += slots[i] >= 0;
    });
    int total = 0;
    int at = exclusive_sum(own, shared.sums, &total);
#pragma unroll
    for (int i = 0; i < kIdsOfThread; ++i) {
      if (slots[i] < 0) continue;
      shared.tile_slots[at] = static_cast<short>(slots[i]);
      shared.tile_positions[at] = static_cast<int>(tile * kTile + threadIdx.x * kIdsOfThread) + i;
      ++at;
    }
    __syncthreads();
    if (threadIdx.x < 32) append_tile(p, shared, total);
    __syncthreads();
  }
}

template <typename T, int kColumns>
__global__ void __launch_bounds__(kSegmentThreads, kSegmentBlocks)
    add_segments(const __grid_constant__ Scratch scratch, const T* grad, int hidden,
                 float* accumulator) {
  wait_for_earlier();
  let_next_begin_if_short();
  // There is memory for as many segments as blocks; read before it is known whether one is there.
  const Segment segment = scratch.segments[blockIdx.x];
  if (static_cast<int>(blockIdx.x) >= scratch.taken->segments) return;
  const int* positions = scratch.positions + segment.begin;
  const bool whole = segment.partial < 0;
  float* to = whole ? accumulator + static_cast<int64_t>(segment.row) * hidden
                    : scratch.partials + static_cast<int64_t>(segment.partial) * hidden;
  for (int column = static_cast<int>(threadIdx.x) * kColumns; column < hidden;
       column += static_cast<int>(blockDim.x) * kColumns) {
    Floats<kColumns> sum = {};
    if (whole) sum = load<kColumns>(to + column);
    for (int first = 0; first < segment.count; first += kBatch) {
      Pack<T, kColumns> rows[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (first + b < segment.count)
          rows[b] = load_pack<kColumns>(grad + static_cast<int64_t>(positions[first + b]) * hidden +
                                        column);
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (first + b >= segment.count) continue;
        const Floats<kColumns> terms = to_floats(rows[b]);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) sum[i] += terms[i];
      }
    }
    store(to + column, sum);
  }
}

/// A warp takes kColumns columns of each lane.
template <int kColumns>
__global__ void __launch_bounds__(256)
    add_split_rows(const __grid_constant__ Scratch scratch, int hidden, float* accumulator) {
  wait_for_earlier();
  let_next_begin_if_short();
  const int pieces = (hidden + 32 * kColumns - 1) / (32 * kColumns);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t work = static_cast<int64_t>(scratch.taken->split_rows) * pieces;
  const int64_t step = static_cast<int64_t>(gridDim.x) * (blockDim.x / 32);
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
       i < work; i += step) {
    const SplitRow split = scratch.split_rows[i / pieces];
    const int column = (static_cast<int>(i % pieces) * 32 + lane) * kColumns;
    if (column >= hidden) continue;
    float* to = accumulator + static_cast<int64_t>(split.row) * hidden + column;
    const float* from =
        scratch.partials + static_cast<int64_t>(split.first_partial) * hidden + column;
    Floats<kColumns> sum = load<kColumns>(to);
#pragma unroll 8
    for (int partial = 0; partial < split.num_partials; ++partial) {
      const Floats<kColumns> terms = load<kColumns>(from + static_cast<int64_t>(partial) * hidden);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sum[c] += terms[c];
    }
    store(to, sum);
  }
}

void list_positions(const EmbeddingBackwardCall& call, const Scratch& scratch,
                    cudaStream_t stream) {
  check(cudaMemsetAsync(scratch.taken, 0, sizeof(Taken), stream));
  int64_t lists = kMinLists;
  int shift = 7;
  while (divide_up(call.tokens.num_rows, lists) > kMaxSlots) {
    lists *= 2;
    ++shift;
  }
  const ListParams params = {.tokens = call.tokens,
                             .padding_token = call.padding_token,
                             .lists_shift = shift,
                             .num_slots = static_cast<int>(divide_up(call.tokens.num_rows, lists)),
                             .scratch = scratch};
  launch_early(list_tokens, {static_cast<unsigned>(lists), kListThreads}, stream, params);
}

template <typename T, int kColumns>
void add_lists(const EmbeddingBackwardCall& call, const Scratch& scratch, cudaStream_t stream) {
  const auto hidden = static_cast<int>(call.hidden);
  const auto threads = static_cast<unsigned>(
      std::min<int64_t>(divide_up(hidden, 32 * kColumns) * 32, kSegmentThreads));
  launch_early(add_segments<T, kColumns>, {static_cast<unsigned>(call.tokens.rows.bound), threads},
               stream, scratch, static_cast<const T*>(call.grad), hidden, call.accumulator);
  // Columns of a lane that an accumulator's vector holds.
  constexpr int kSplitColumns = kColumns == 1 ? 1 : kVectorWidth<float>;
  launch_early(add_split_rows<kSplitColumns>, {static_cast<unsigned>(call.num_sms), 256}, stream,
               scratch, hidden, call.accumulator);
}

}  // namespace

int64_t embedding_backward_workspace(int64_t num_tokens, int64_t hidden) {
  return Scratch(nullptr, num_tokens, hidden).num_bytes;
}

void launch_embedding_backward(const EmbeddingBackwardCall& call, cudaStream_t stream) {
  if (call.tokens.rows.bound == 0 || call.hidden == 0 || call.tokens.num_rows == 0) return;
  const Scratch scratch(call.workspace, call.tokens.rows.bound, call.hidden);
  list_positions(call, scratch, stream);
  const bool vectors =
      are_whole_vectors(call.dtype, call.hidden) && are_aligned(call.grad, call.accumulator);
  with_vectors(call.dtype, vectors,
               [&]<typename T, int kWidth>() { add_lists<T, kWidth>(call, scratch, stream); });
}

}  // namespace tessera::cuda
