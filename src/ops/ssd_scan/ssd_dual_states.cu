// The states before the chunks and the gradients of those behind them. A block goes through the
// chunks of a segment with two slices' states in registers, in F32: first from 0, for what segments
// add, then, with the states between segments known, to write those between chunks.
#include "ops/ssd_scan/ssd_dual.cuh"
#include "ops/ssd_scan/ssd_steps.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSlices = 2;  // of a block
constexpr int kRowWarps = kThreads / 32 / kSlices;
constexpr int kColumns = kSlices * kSsdSlice;
constexpr int kValueStride = kColumns + kSsdPadding;
constexpr int kHalf = kSsdRows / 2;
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
  static constexpr int kStride = kRows + kSsdPadding;
  BFloat16 vectors[kHalf * kStride];
  BFloat16 values[kHalf * kValueStride];
  float factors[kSlices][kHalf];
};

template <int kRows>
struct WalkShared {
  WalkStage<kRows> stages[kStages];
  float dots[kThreads / 32];
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
  copy_part<kHalf, kRows, WalkStage<kRows>::kStride, kThreads>(
      stage.vectors, half_of(group_rows(x, walk.vectors, chunk, slices.group), first));
#pragma unroll
  for (int k = 0; k < kSlices; ++k) {
    const int there = k < slices.count ? k : 0;
    const int head = slices.head(there);
    SsdPart part = half_of(slice_rows(x, walk.values, chunk, head, slices.part(there)), first);
    if (k >= slices.count) part.rows = 0;
    copy_part<kHalf, kSsdSlice, kValueStride, kThreads>(stage.values + k * kSsdSlice, part);
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
      BFloat16* at = stage.values + row * kValueStride + k * kSsdSlice + column;
      Floats<8> values = load<8>(at);
      const float factor = stage.factors[k][row];
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] *= factor;
      store(at, values);
    });
  }
}

/// Writes a warp's part of a state at `at` and, on the way back, leaves its product with the state
/// before the chunk.
template <bool kReverse, int kTileRows>
__device__ __forceinline__ void keep_state(WarpTile<kTileRows, kSsdSlice>& state, float* dots,
                                           const SsdDual& scratch, const Walk& walk, int64_t at,
                                           bool holds) {
  float dot = 0;
  if (holds) {
    state.for_each_pair([&](int i, int j, float& a, float& b) {
      const int64_t pair = at + i * kSsdSlice + j;
      store_pair(bf16(walk.states) + pair, a, b);
      if (kReverse) {
        const float2 before = load_pair(bf16(scratch.states) + pair);
        dot += a * before.x + b * before.y;
      }
    });
  }
  if (!kReverse) return;
  dot = sum_lanes(dot);
  if (threadIdx.x % 32 == 0) dots[threadIdx.x / 32] = dot;
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
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<WalkShared<kRows>*>(memory);
  wait_for_earlier();
  const WalkSlices slices(x, sizes);
  const int segment = static_cast<int>(blockIdx.x);
  const WalkChunks<kReverse> chunks(x, scratch, sizes, segment, kKeeps);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int own = warp / kRowWarps;  // slice
  const bool holds = own < slices.count;
  const int slice = slices.first + (holds ? own : 0);
  const int head = slices.head(holds ? own : 0);
  const int row = warp % kRowWarps * (kRows / kRowWarps);
  const auto load = [&](int step) {
    if (step < 2 * chunks.count)
      load_half(shared.stages[step % kStages], x, walk, slices, SsdChunk(x, chunks.at(step / 2)),
                step % 2 * kHalf);
    commit_copies();
  };
  for (int step = 0; step < kStages - 1; ++step) load(step);
  float* const of_segment =
      scratch.segment +
      (static_cast<int64_t>(segment) * sizes.slices + slice) * sizes.state_values + row * kSsdSlice;
  WarpTile<kRows / kRowWarps, kSsdSlice> state;
  if (kKeeps && holds) {
    state.for_each_pair([&](int i, int j, float& a, float& b) {
      const float2 two = *reinterpret_cast<const float2*>(of_segment + i * kSsdSlice + j);
      a = two.x;
      b = two.y;
    });
  }
  float all_kept = chunks.count > 0 ? 1 : 0;
  for (int step = 0; step < 2 * chunks.count; ++step) {
    auto& stage = shared.stages[step % kStages];
    const int chunk = chunks.at(step / 2);
    const float kept = scratch.kept[static_cast<int64_t>(chunk) * x.heads + head];
    wait_copies<kStages - 2>();
    scale_values(stage);
    __syncthreads();
    load(step + kStages - 1);
    if (step % 2 == 0) {
      if (kKeeps)
        keep_state<kReverse>(
            state, shared.dots, scratch, walk,
            (static_cast<int64_t>(chunk) * sizes.slices + slice) * sizes.state_values +
                row * kSsdSlice,
            holds);
      all_kept *= kept;
      state.for_each_pair([&](int /*i*/, int /*j*/, float& a, float& b) {
        a = kept == 0.0F ? 0.0F : kept * a;
        b = kept == 0.0F ? 0.0F : kept * b;
      });
    } else if (kKeeps && kReverse && holds && threadIdx.x % (kRowWarps * 32) == 0) {
      float sum = 0;
      for (int i = 0; i < kRowWarps; ++i) sum += shared.dots[warp + i];
      walk.joined[static_cast<int64_t>(chunk) * sizes.slices + slice] =
          kept == 0.0F ? 0.0F : kept * sum;
    }
    state.template add<false, false, kHalf>({stage.vectors, WalkStage<kRows>::kStride}, row,
                                            {stage.values, kValueStride}, own * kSsdSlice);
  }
  wait_copies<0>();
  if (kKeeps || !holds) return;
  state.for_each_pair([&](int i, int j, float& a, float& b) {
    *reinterpret_cast<float2*>(of_segment + i * kSsdSlice + j) = {a, b};
  });
  if (threadIdx.x % (kRowWarps * 32) == 0)
    scratch.segment_kept[static_cast<int64_t>(segment) * x.heads + head] = all_kept;
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
