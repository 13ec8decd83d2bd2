// The states before the chunks and the gradients of those behind them. A block goes through the
// chunks of a segment with two slices' states in registers, in F32: first from 0, for what segments
// add, then, with the states between segments known, to write those between chunks.
#include "ops/cuda/ptx/bulk_copy.cuh"
#include "ops/cuda/ptx/warpgroup_product.cuh"
#include "ops/ssd_scan/ssd_dual.cuh"
#include "ops/ssd_scan/ssd_steps.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSlices = 2;  // of a block
constexpr int kHalf = kSsdRows / 2;
constexpr int kTile = kHalf * kSsdSlice;  // swizzled
constexpr int kStages = 3;

/// What a walk adds to the states, token by token: vector valueᵀ times a factor.
struct Walk {
  const void* vectors;   ///< [T,G,N]
  const void* values;    ///< [T,H,P]
  const float* factors;  ///< rows of chunks
  void* states;          ///< BF16: where those between chunks go
  float* joined;         ///< on the way back
};

/// Half a chunk's rows, of which several are under way.
template <int kRows>
struct WalkStage {
  alignas(1024) BFloat16 vectors[kRows / kSsdSlice][kTile];
  alignas(1024) BFloat16 values[kSlices][kTile];
  float factors[kSlices][kHalf];
};

template <int kRows>
struct WalkShared {
  WalkStage<kRows> stages[kStages];
  float dots[kThreads / 32][kSlices];
};

/// The slices of a block.
struct WalkSlices {
  int group;
  int first;
  int count;
  int of_head;

  __device__ __forceinline__ WalkSlices(const SsdRows& x, const SsdDualSizes& sizes) {
    const int of_group = sizes.group_heads * sizes.head_slices;
    group = static_cast<int>(blockIdx.y) / sizes.group_pairs;
    const int at = static_cast<int>(blockIdx.y) % sizes.group_pairs * kSlices;
    first = group * of_group + at;
    count = min(kSlices, of_group - at);
    of_head = sizes.head_slices;
  }
  __device__ __forceinline__ int head(int k) const { return (first + k) / of_head; }
  __device__ __forceinline__ int part(int k) const { return (first + k) % of_head; }
};

/// Rows [first, first + kHalf) of a part.
__device__ __forceinline__ SsdPart half_of(SsdPart part, int first) {
  part.data += first < part.rows ? first * part.stride : 0;
  part.rows -= first;
  return part;
}

template <int kRows>
__device__ __forceinline__ void load_half(WalkStage<kRows>& stage, const SsdRows& x,
                                          const Walk& walk, const WalkSlices& slices,
                                          const SsdChunk& chunk, int first) {
  const SsdPart vectors = half_of(group_rows(x, walk.vectors, chunk, slices.group), first);
#pragma unroll
  for (int i = 0; i < kRows / kSsdSlice; ++i) {
    SsdPart part = vectors;
    part.data += i * kSsdSlice < vectors.columns ? i * kSsdSlice : 0;
    part.columns -= i * kSsdSlice;
    copy_swizzled<kHalf, kThreads>(stage.vectors[i], part);
  }
#pragma unroll
  for (int k = 0; k < kSlices; ++k) {
    const int there = k < slices.count ? k : 0;
    const int head = slices.head(there);
    SsdPart part = half_of(slice_rows(x, walk.values, chunk, head, slices.part(there)), first);
    if (k >= slices.count) part.rows = 0;
    copy_swizzled<kHalf, kThreads>(stage.values[k], part);
    // By the warp that has the row's values.
    const float* factors = walk.factors + chunk.rows_at(x, head) + first;
    for_own_vectors<kHalf, kSsdSlice, kThreads>([&](int row, int column) {
      if (column == 0) copy_async(&stage.factors[k][row], factors + row);
    });
  }
}

/// Multiplies the values that the thread has copied by their factors.
template <int kRows>
__device__ __forceinline__ void scale_values(WalkStage<kRows>& stage) {
  __syncwarp();
#pragma unroll
  for (int k = 0; k < kSlices; ++k) {
    for_own_vectors<kHalf, kSsdSlice, kThreads>([&](int row, int column) {
      BFloat16* at = stage.values[k] + row * kSsdSlice + (column ^ row % 8 * 8);
      Floats<8> values = load<8>(at);
      const float factor = stage.factors[k][row];
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] *= factor;
      store(at, values);
    });
  }
}

/// A warpgroup's part of the block's states: 64 rows of both slices or, where there are no more
/// rows, of one.
template <int kRows>
struct WalkStates {
  static constexpr bool kHasBoth = kRows > kSsdSlice;
  static constexpr int kColumns = kHasBoth ? 2 * kSsdSlice : kSsdSlice;
  static constexpr TileMajor kMajor = TileMajor::kOther;
  float sums[kColumns / 2] = {};
  int group = static_cast<int>(threadIdx.x) / 128;

  /// Calls take(slice, where in its values, first, second) for each pair of neighbours.
  template <typename Take>
  __device__ __forceinline__ void for_each_pair(Take take) {
    const int row = static_cast<int>(threadIdx.x) / 32 % 4 * 16 +
                    static_cast<int>(threadIdx.x) % 32 / 4 + (kHasBoth ? group * kSsdSlice : 0);
    const int column = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int i = 0; i < kColumns / 2; i += 2) {
      const int at = i / 4 * 8;
      take(kHasBoth ? at / kSsdSlice : group,
           (row + i / 2 % 2 * 8) * kSsdSlice + at % kSsdSlice + column, sums[i], sums[i + 1]);
    }
  }
  /// Calls take(slice, where in its values, four tiles, half) for each row of four tiles, where
  /// that is the place of the eight values that turn_quads gives this thread.
  template <typename Take>
  __device__ __forceinline__ void for_each_line(Take take) {
    const int row = static_cast<int>(threadIdx.x) / 32 % 4 * 16 +
                    static_cast<int>(threadIdx.x) % 32 / 4 + (kHasBoth ? group * kSsdSlice : 0);
    const int column = static_cast<int>(threadIdx.x) % 4 * 8;
#pragma unroll
    for (int four = 0; four < kColumns / 32; ++four) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        take(kHasBoth ? four / 2 : group, (row + 8 * half) * kSsdSlice + four % 2 * 32 + column,
             sums + 16 * four, half);
    }
  }
  __device__ __forceinline__ void decay(const float (&kept)[kSlices]) {
    for_each_pair([&](int k, int /*at*/, float& a, float& b) {
      a = kept[k] == 0.0F ? 0.0F : kept[k] * a;
      b = kept[k] == 0.0F ? 0.0F : kept[k] * b;
    });
  }
  __device__ __forceinline__ void add(const WalkStage<kRows>& stage) {
    constexpr uint32_t kTileBytes = kTile * sizeof(BFloat16);
    const uint64_t vectors = describe_tile<kMajor>(stage.vectors[kHasBoth ? group : 0], kTileBytes);
    const uint64_t values = describe_tile<kMajor>(stage.values[kHasBoth ? 0 : group], kTileBytes);
    fence_values(sums);
    begin_products();
#pragma unroll
    for (int k = 0; k < kHalf / 16; ++k)
      WarpgroupProduct<kColumns, kMajor, kMajor>::run(sums, vectors + k * kNextReduction<kMajor>,
                                                      values + k * kNextReduction<kMajor>, true);
    commit_products();
    wait_products<0>();
    fence_values(sums);
  }
};

/// Where a block's states lie in [.., slices, values].
struct WalkPlace {
  int64_t first;
  int64_t values;

  __device__ __forceinline__ int64_t at(int k, int in_slice) const {
    return first + k * values + in_slice;
  }
};

/// Writes states at `place` and, on the way back, leaves the products of these and the states
/// before the chunk.
template <bool kReverse, int kRows>
__device__ __forceinline__ void keep_states(WalkStates<kRows>& states, float (*dots)[kSlices],
                                            const SsdDual& scratch, const Walk& walk,
                                            const WalkPlace& place, int count) {
  float own[kSlices] = {};
  states.for_each_line([&](int k, int in_slice, const float* tiles, int half) {
    const uint4 line = turn_quads(pack_tiles(tiles, half));
    const int64_t at = place.at(k, in_slice);
    if (k < count) *reinterpret_cast<uint4*>(bf16(walk.states) + at) = line;
    if constexpr (kReverse) {
      uint4 before = {};
      if (k < count) before = *reinterpret_cast<const uint4*>(bf16(scratch.states) + at);
      before = turn_quads(before);
      const uint32_t pairs[4] = {before.x, before.y, before.z, before.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(pairs + i));
        own[k] += tiles[4 * i + 2 * half] * pair.x + tiles[4 * i + 2 * half + 1] * pair.y;
      }
    }
  });
  if constexpr (kReverse) {
#pragma unroll
    for (int k = 0; k < kSlices; ++k) {
      const float dot = sum_lanes(own[k]);
      if (threadIdx.x % 32 == 0) dots[threadIdx.x / 32][k] = dot;
    }
  }
}

/// The chunks of a walk, in its order.
template <bool kReverse>
struct WalkChunks {
  int first;
  int count;

  /// All of a segment, or, where not `all`, those from which what it adds follows: none where
  /// nobody needs that, since a sequence begins there.
  __device__ __forceinline__ WalkChunks(const SsdRows& x, const SsdDual& scratch,
                                        const SsdDualSizes& sizes, int segment, bool all)
      : first(segment * sizes.segment_chunks),
        count(min(sizes.segment_chunks, sizes.chunks - first)) {
    if (all) return;
    const int border = (kReverse ? first : first + count) * kSsdRows;
    const bool is_needed = border > 0 && border < x.tokens && scratch.starts[border] != border;
    const int last = first + count - 1;
    int needed = 0;
    while (is_needed && needed < count) {
      const SsdChunk chunk(x, kReverse ? first + needed : last - needed);
      ++needed;
      if (chunk.has_start(scratch)) break;
    }
    if (!kReverse) first = last + 1 - needed;
    count = needed;
  }
  __device__ __forceinline__ int at(int step) const {
    return kReverse ? first + count - 1 - step : first + step;
  }
};

template <int kRows, bool kReverse, bool kKeeps>
__global__ void __launch_bounds__(kThreads, 2)
    walk_segment(const __grid_constant__ SsdRows x, SsdDual scratch, SsdDualSizes sizes,
                 Walk walk) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<WalkShared<kRows>*>(memory);
  wait_for_earlier();
  const WalkSlices slices(x, sizes);
  const int segment = static_cast<int>(blockIdx.x);
  const WalkChunks<kReverse> chunks(x, scratch, sizes, segment, kKeeps);
  const auto load = [&](int step) {
    if (step < 2 * chunks.count)
      load_half(shared.stages[step % kStages], x, walk, slices, SsdChunk(x, chunks.at(step / 2)),
                step % 2 * kHalf);
    commit_copies();
  };
  for (int step = 0; step < kStages - 1; ++step) load(step);
  const WalkPlace of_segment{
      (static_cast<int64_t>(segment) * sizes.slices + slices.first) * sizes.state_values,
      sizes.state_values};
  WalkStates<kRows> states;
  if (kKeeps) {
    states.for_each_pair([&](int k, int in_slice, float& a, float& b) {
      if (k >= slices.count) return;
      const float2 two =
          *reinterpret_cast<const float2*>(scratch.segment + of_segment.at(k, in_slice));
      a = two.x;
      b = two.y;
    });
  }
  const auto load_kept = [&](float(&kept)[kSlices], int step) {
    const int chunk = chunks.at(min(step / 2, chunks.count - 1));
#pragma unroll
    for (int k = 0; k < kSlices; ++k)
      kept[k] =
          scratch
              .kept[static_cast<int64_t>(chunk) * x.heads + slices.head(k < slices.count ? k : 0)];
  };
  const float start = chunks.count > 0 ? 1 : 0;
  float all_kept[kSlices] = {start, start};
  float next_kept[kSlices];
  if (chunks.count > 0) load_kept(next_kept, 0);
  for (int step = 0; step < 2 * chunks.count; ++step) {
    auto& stage = shared.stages[step % kStages];
    const int64_t slice = static_cast<int64_t>(chunks.at(step / 2)) * sizes.slices + slices.first;
    const float kept[kSlices] = {next_kept[0], next_kept[1]};
    load_kept(next_kept, step + 1);
    wait_copies<kStages - 2>();
    scale_values(stage);
    fence_shared_for_async();
    __syncthreads();
    load(step + kStages - 1);
    if (step % 2 == 0) {
      if (kKeeps)
        keep_states<kReverse>(states, shared.dots, scratch, walk,
                              {slice * sizes.state_values, sizes.state_values}, slices.count);
      states.decay(kept);
#pragma unroll
      for (int k = 0; k < kSlices; ++k) all_kept[k] *= kept[k];
    } else if (kKeeps && kReverse && static_cast<int>(threadIdx.x) < slices.count) {
      const int k = static_cast<int>(threadIdx.x);
      float sum = 0;
      for (int warp = 0; warp < kThreads / 32; ++warp) sum += shared.dots[warp][k];
      const float own = k == 0 ? kept[0] : kept[1];
      walk.joined[slice + k] = own == 0.0F ? 0.0F : own * sum;
    }
    states.add(stage);
  }
  wait_copies<0>();
  if (kKeeps) return;
  states.for_each_pair([&](int k, int in_slice, float& a, float& b) {
    if (k < slices.count)
      *reinterpret_cast<float2*>(scratch.segment + of_segment.at(k, in_slice)) = {a, b};
  });
  if (static_cast<int>(threadIdx.x) < slices.count)
    scratch.segment_kept[static_cast<int64_t>(segment) * x.heads +
                         slices.head(static_cast<int>(threadIdx.x))] =
        threadIdx.x == 0 ? all_kept[0] : all_kept[1];
}

template <int kRows, bool kReverse>
void launch_walks(const SsdRows& x, const SsdDual& scratch, const Walk& walk, cudaStream_t stream) {
  const SsdDualSizes sizes = sizes_of(x);
  const dim3 blocks(static_cast<unsigned>(sizes.segments),
                    static_cast<unsigned>(x.groups * sizes.group_pairs));
  constexpr size_t kBytes = sizeof(WalkShared<kRows>);
  launch_dual(walk_segment<kRows, kReverse, false>, blocks, kThreads, kBytes, stream, x, scratch,
              sizes, walk);
  pass_ssd_parts({.chunk_decays = scratch.segment_kept,
                  .states = scratch.segment,
                  .ends = nullptr,
                  .start = nullptr,
                  .elements = sizes.head_slices * sizes.state_values,
                  .heads = x.heads,
                  .chunks = sizes.segments},
                 kReverse, stream);
  launch_dual(walk_segment<kRows, kReverse, true>, blocks, kThreads, kBytes, stream, x, scratch,
              sizes, walk);
}

}  // namespace

void launch_ssd_dual_states(const SsdRows& x, const SsdDual& scratch, cudaStream_t stream) {
  const Walk walk = {.vectors = x.b,
                     .values = x.x,
                     .factors = scratch.writes,
                     .states = scratch.states,
                     .joined = nullptr};
  with_state_rows(sizes_of(x),
                  [&]<int kRows>() { launch_walks<kRows, false>(x, scratch, walk, stream); });
}

void launch_ssd_dual_state_grads(const SsdRows& x, const SsdDual& scratch,
                                 const SsdDualBackward& backward, const void* grad,
                                 cudaStream_t stream) {
  const Walk walk = {.vectors = x.c,
                     .values = grad,
                     .factors = scratch.reads,
                     .states = backward.state_grads,
                     .joined = backward.joined};
  with_state_rows(sizes_of(x),
                  [&]<int kRows>() { launch_walks<kRows, true>(x, scratch, walk, stream); });
}

}  // namespace tessera::cuda
