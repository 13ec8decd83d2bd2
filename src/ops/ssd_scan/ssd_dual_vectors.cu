// What states give to the gradients of C, and their gradients to those of B: sums over the heads of
// a block of products that each head first multiplies by factors of its rows, in F32. A warpgroup
// has half a chunk's rows.
#include "ops/cuda/ptx/bulk_copy.cuh"
#include "ops/cuda/ptx/register_product.cuh"
#include "ops/ssd_scan/ssd_dual.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kGroupRows = 64;  // of a warpgroup
static_assert(kThreads / 128 * kGroupRows == kSsdRows);

struct VectorsCall {
  const void* values;    ///< [T,H,P]: what is multiplied by states
  const void* vectors;   ///< [T,G,N]: what results are multiplied by for the dots
  const void* states;    ///< BF16 [chunks, slices, rows, 64]
  const float* factors;  ///< rows of chunks
  float* dots;           ///< rows of chunks
  float* to;             ///< [all blocks, chunks, kSsdRows, rows]
};

template <int kRows>
struct VectorsShared {
  static constexpr int kStride = kRows + kSsdPadding;
  struct Stage {
    alignas(1024) BFloat16 values[kSsdRows * kSsdSlice];  // swizzled
    alignas(1024) BFloat16 states[kRows * kSsdSlice];     // likewise
    float factors[kSsdRows];
  };
  Stage stages[2];
  BFloat16 vectors[kSsdRows * kStride];
};

/// The heads of a block, and which slice a step takes.
struct BlockHeads {
  int group;
  int begin;
  int end;
  int of_head;

  __device__ __forceinline__ BlockHeads(const SsdDualSizes& sizes, int block) {
    group = block / sizes.head_blocks;
    const int first = block % sizes.head_blocks * kSsdHeadBlock;
    begin = group * sizes.group_heads + first;
    end = begin + min(kSsdHeadBlock, sizes.group_heads - first);
    of_head = sizes.head_slices;
  }
  __device__ __forceinline__ int steps() const { return (end - begin) * of_head; }
  __device__ __forceinline__ int head(int step) const { return begin + step / of_head; }
  __device__ __forceinline__ int part(int step) const { return step % of_head; }
};

template <int kRows>
__device__ __forceinline__ void load_stage(typename VectorsShared<kRows>::Stage& stage,
                                           const SsdRows& x, const VectorsCall& call,
                                           const SsdDualSizes& sizes, const SsdChunk& chunk,
                                           int head, int part) {
  copy_swizzled<kSsdRows, kThreads>(stage.values, slice_rows(x, call.values, chunk, head, part));
  const int64_t slice =
      static_cast<int64_t>(chunk.idx) * sizes.slices + head * sizes.head_slices + part;
  copy_swizzled<kRows, kThreads>(
      stage.states, {bf16(call.states) + slice * sizes.state_values, kSsdSlice, kRows, kSsdSlice});
  copy_floats<kSsdRows, kThreads>(stage.factors, call.factors + chunk.rows_at(x, head));
  commit_copies();
}

/// A thread's part of a warpgroup's rows, summed over heads, and its dots of one head.
template <int kRows>
struct VectorTile {
  static constexpr int kParts = kRows / kSsdSlice;
  static constexpr TileMajor kMajor = TileMajor::kReduction;
  using Shared = VectorsShared<kRows>;
  float total[kParts][kSsdSlice / 2] = {};
  float dots[2] = {};
  int group = static_cast<int>(threadIdx.x) / 128;
  int first = static_cast<int>(threadIdx.x) / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
  int column = static_cast<int>(threadIdx.x) % 4 * 2;

  /// The products of a slice with 64 columns of its states.
  __device__ __forceinline__ void multiply(float (&fresh)[kSsdSlice / 2],
                                           const typename Shared::Stage& stage, int part) const {
    const uint64_t values = describe_tile<kMajor>(stage.values + group * kGroupRows * kSsdSlice, 0);
    const uint64_t states = describe_tile<kMajor>(stage.states + part * kSsdSlice * kSsdSlice, 0);
    begin_products();
    FirstProduct<kSsdSlice>::run(fresh, values, states);
#pragma unroll
    for (int k = 1; k < kSsdSlice / 16; ++k)
      WarpgroupProduct<kSsdSlice, kMajor, kMajor>::run(fresh, values + k * kNextReduction<kMajor>,
                                                       states + k * kNextReduction<kMajor>, true);
    commit_products();
    wait_products<0>();
    fence_values(fresh);
  }
  __device__ __forceinline__ void add(const Shared& shared, const typename Shared::Stage& stage) {
    const float factors[2] = {stage.factors[first], stage.factors[first + 8]};
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      float fresh[kSsdSlice / 2];
      multiply(fresh, stage, part);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const BFloat16* vectors =
            shared.vectors + (first + 8 * h) * Shared::kStride + part * kSsdSlice + column;
        float dot = 0;
#pragma unroll
        for (int j = 0; j < kSsdSlice / 8; ++j) {
          const int at = 4 * j + 2 * h;
          const float2 vector = load_pair(vectors + 8 * j);
          dot += fresh[at] * vector.x + fresh[at + 1] * vector.y;
          total[part][at] += factors[h] * fresh[at];
          total[part][at + 1] += factors[h] * fresh[at + 1];
        }
        dots[h] += factors[h] * dot;
      }
    }
  }
  /// A head's dots, to global memory.
  __device__ __forceinline__ void write_dots(float* to) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float dot = sum_lanes<4>(dots[h]);
      if (threadIdx.x % 4 == 0) to[first + 8 * h] = dot;
      dots[h] = 0;
    }
  }
  __device__ __forceinline__ void write(float* to) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kSsdSlice / 2; i += 2)
        *reinterpret_cast<float2*>(to + (first + i / 2 % 2 * 8) * kRows + part * kSsdSlice +
                                   i / 4 * 8 + column) = {total[part][i], total[part][i + 1]};
    }
  }
};

template <int kRows>
__global__ void __launch_bounds__(kThreads, 2)
    sum_vectors(const __grid_constant__ SsdRows x, SsdDualSizes sizes, VectorsCall call) {
  using Shared = VectorsShared<kRows>;
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  wait_for_earlier();
  const SsdChunk chunk(x, static_cast<int>(blockIdx.x));
  const BlockHeads heads(sizes, static_cast<int>(blockIdx.y));
  copy_part<kSsdRows, kRows, Shared::kStride, kThreads>(
      shared.vectors, group_rows(x, call.vectors, chunk, heads.group));
  VectorTile<kRows> tile;
  const int steps = heads.steps();
  const auto load = [&](int step) {
    load_stage<kRows>(shared.stages[step % 2], x, call, sizes, chunk, heads.head(step),
                      heads.part(step));
  };
  load(0);
  for (int step = 0; step < steps; ++step) {
    wait_copies<0>();
    fence_shared_for_async();
    __syncthreads();
    if (step + 1 < steps) load(step + 1);
    tile.add(shared, shared.stages[step % 2]);
    if (heads.part(step) + 1 == heads.of_head)
      tile.write_dots(call.dots + chunk.rows_at(x, heads.head(step)));
  }
  tile.write(call.to +
             (static_cast<int64_t>(blockIdx.y) * sizes.chunks + chunk.idx) * kSsdRows * kRows);
}

}  // namespace

void launch_ssd_dual_vectors(const SsdRows& x, const SsdDual& scratch,
                             const SsdDualBackward& backward, const void* grad,
                             cudaStream_t stream) {
  const SsdDualSizes sizes = sizes_of(x);
  const dim3 blocks(static_cast<unsigned>(sizes.chunks), static_cast<unsigned>(sizes.all_blocks));
  const VectorsCall of_c = {.values = grad,
                            .vectors = x.c,
                            .states = scratch.states,
                            .factors = scratch.reads,
                            .dots = backward.read_dots,
                            .to = backward.of_c};
  const VectorsCall of_b = {.values = x.x,
                            .vectors = x.b,
                            .states = backward.state_grads,
                            .factors = scratch.writes,
                            .dots = backward.write_dots,
                            .to = backward.of_b};
  with_state_rows(sizes, [&]<int kRows>() {
    for (const VectorsCall& call : {of_c, of_b})
      launch_dual(sum_vectors<kRows>, blocks, kThreads, sizeof(VectorsShared<kRows>), stream, x,
                  sizes, call);
  });
}

}  // namespace tessera::cuda
