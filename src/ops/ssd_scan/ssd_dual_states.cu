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
static_assert(kThreads == kSlices * kSsdRows);

/// What a walk adds to the states, token by token: vector valueᵀ times a factor.
struct Walk {
  const void* vectors;   ///< [T,G,N]
  const void* values;    ///< [T,H,P]
  const float* factors;  ///< rows of chunks
  void* states;          ///< BF16: where those between chunks go
  float* joined;         ///< on the way back
};

template <int kRows>
struct WalkShared {
  static constexpr int kStride = kRows + kSsdPadding;
  BFloat16 vectors[kSsdRows * kStride];
  BFloat16 values[kSsdRows * kValueStride];
  float factors[kSlices][kSsdRows];
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
    const int pairs = (of_group + kSlices - 1) / kSlices;
    group = static_cast<int>(blockIdx.y) / pairs;
    const int at = static_cast<int>(blockIdx.y) % pairs * kSlices;
    first = group * of_group + at;
    count = min(kSlices, of_group - at);
    of_head = sizes.head_slices;
  }
  __device__ __forceinline__ int head(int k) const { return (first + k) / of_head; }
  __device__ __forceinline__ int part(int k) const { return (first + k) % of_head; }
};

template <int kRows>
__device__ __forceinline__ void load_chunk(WalkShared<kRows>& shared, const SsdRows& x,
                                           const Walk& walk, const WalkSlices& slices,
                                           const SsdChunk& chunk) {
  copy_part<kSsdRows, kRows, WalkShared<kRows>::kStride, kThreads>(
      shared.vectors, group_rows(x, walk.vectors, chunk, slices.group));
#pragma unroll
  for (int k = 0; k < kSlices; ++k) {
    const bool there = k < slices.count;
    SsdPart part =
        slice_rows(x, walk.values, chunk, slices.head(there ? k : 0), slices.part(there ? k : 0));
    if (!there) part.rows = 0;
    copy_part<kSsdRows, kSsdSlice, kValueStride, kThreads>(shared.values + k * kSsdSlice, part);
  }
  commit_copies();
  const int k = static_cast<int>(threadIdx.x) / kSsdRows;
  const int row = static_cast<int>(threadIdx.x) % kSsdRows;
  shared.factors[k][row] =
      k < slices.count ? walk.factors[chunk.rows_at(x, slices.head(k)) + row] : 0.0F;
}

/// Multiplies the values that the thread has copied by their factors.
template <int kRows>
__device__ __forceinline__ void scale_values(WalkShared<kRows>& shared) {
#pragma unroll
  for (int k = 0; k < kSlices; ++k) {
    for_own_vectors<kSsdRows, kSsdSlice, kThreads>([&](int row, int column) {
      BFloat16* at = shared.values + row * kValueStride + k * kSsdSlice + column;
      Floats<8> values = load<8>(at);
      const float factor = shared.factors[k][row];
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] *= factor;
      store(at, values);
    });
  }
}

template <int kRows, bool kReverse, bool kKeeps>
__global__ void __launch_bounds__(kThreads, 2)
    walk_segment(const __grid_constant__ SsdRows x, SsdDual scratch, SsdDualSizes sizes,
                 Walk walk) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<WalkShared<kRows>*>(memory);
  wait_for_earlier();
  const WalkSlices slices(x, sizes);
  const int segment = static_cast<int>(blockIdx.x);
  const int first = segment * kSsdSegment;
  const int count = min(kSsdSegment, sizes.chunks - first);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int own = warp / kRowWarps;  // slice
  const bool holds = own < slices.count;
  const int slice = slices.first + (holds ? own : 0);
  const int head = slices.head(holds ? own : 0);
  const int row = warp % kRowWarps * (kRows / kRowWarps);
  const int64_t values = sizes.state_values;
  float* const of_segment = scratch.segment +
                            (static_cast<int64_t>(segment) * sizes.slices + slice) * values +
                            row * kSsdSlice;
  WarpTile<kRows / kRowWarps, kSsdSlice> state;
  if (kKeeps && holds) {
    state.for_each_pair([&](int i, int j, float& a, float& b) {
      const float2 two = *reinterpret_cast<const float2*>(of_segment + i * kSsdSlice + j);
      a = two.x;
      b = two.y;
    });
  }
  float all_kept = 1;
  for (int done = 0; done < count; ++done) {
    const SsdChunk chunk(x, kReverse ? first + count - 1 - done : first + done);
    const float kept = scratch.kept[static_cast<int64_t>(chunk.idx) * x.heads + head];
    __syncthreads();
    load_chunk(shared, x, walk, slices, chunk);
    const int64_t at =
        (static_cast<int64_t>(chunk.idx) * sizes.slices + slice) * values + row * kSsdSlice;
    if (kKeeps && holds) {
      float dot = 0;
      state.for_each_pair([&](int i, int j, float& a, float& b) {
        const int64_t pair = at + i * kSsdSlice + j;
        store_pair(bf16(walk.states) + pair, a, b);
        if (kReverse) {
          const float2 before = load_pair(bf16(scratch.states) + pair);
          dot += a * before.x + b * before.y;
        }
      });
      if (kReverse) {
        dot = sum_lanes(dot);
        if (threadIdx.x % 32 == 0) shared.dots[warp] = kept == 0.0F ? 0.0F : kept * dot;
      }
    }
    wait_copies<0>();
    __syncthreads();
    if (kKeeps && kReverse && holds && threadIdx.x % (kRowWarps * 32) == 0) {
      float sum = 0;
      for (int i = 0; i < kRowWarps; ++i) sum += shared.dots[warp + i];
      walk.joined[static_cast<int64_t>(chunk.idx) * sizes.slices + slice] = sum;
    }
    scale_values(shared);
    __syncthreads();
    all_kept *= kept;
    state.for_each_pair([&](int /*i*/, int /*j*/, float& a, float& b) {
      a = kept == 0.0F ? 0.0F : kept * a;
      b = kept == 0.0F ? 0.0F : kept * b;
    });
    state.template add<false, false, kSsdRows>({shared.vectors, WalkShared<kRows>::kStride}, row,
                                               {shared.values, kValueStride}, own * kSsdSlice);
  }
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
  const int pairs =
      static_cast<int>(divide_up(int64_t{sizes.group_heads} * sizes.head_slices, kSlices));
  const dim3 blocks(static_cast<unsigned>(sizes.segments), static_cast<unsigned>(x.groups * pairs));
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
