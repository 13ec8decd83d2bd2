// What states give to the gradients of C, and their gradients to those of B: sums over the heads of
// a block of products that each head first multiplies by factors of its rows, in F32.
#include "ops/ssd_scan/ssd_dual.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kColumnWarps = 2;
constexpr int kStages = 3;
constexpr int kTileRows = 32;  // of a warp
static_assert(kThreads / 32 / kColumnWarps * kTileRows == kSsdRows);

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
    BFloat16 values[kSsdRows * kSsdSliceStride];
    BFloat16 states[kRows * kSsdSliceStride];
    float factors[kSsdRows];
  };
  BFloat16 vectors[kSsdRows * kStride];
  Stage stages[kStages];
  float dots[kColumnWarps][kSsdRows];
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
  copy_part<kSsdRows, kSsdSlice, kSsdSliceStride, kThreads>(
      stage.values, slice_rows(x, call.values, chunk, head, part));
  const int64_t slice =
      static_cast<int64_t>(chunk.idx) * sizes.slices + head * sizes.head_slices + part;
  copy_part<kRows, kSsdSlice, kSsdSliceStride, kThreads>(
      stage.states, {bf16(call.states) + slice * sizes.state_values, kSsdSlice, kRows, kSsdSlice});
  copy_floats<kSsdRows, kThreads>(stage.factors, call.factors + chunk.rows_at(x, head));
}

/// A warp's 32 rows of half the columns, summed over heads, and its dots of one head.
template <int kRows>
struct VectorTile {
  static constexpr int kParts = kRows / kColumnWarps / 16;
  using Shared = VectorsShared<kRows>;
  float total[2][2 * kParts][4] = {};
  float dots[2][2] = {};
  int row = static_cast<int>(threadIdx.x) / 32 / kColumnWarps * kTileRows;
  int half = static_cast<int>(threadIdx.x) / 32 % kColumnWarps;

  __device__ __forceinline__ int row_of(int i, int h) const {
    return row + 16 * i + 8 * h + static_cast<int>(threadIdx.x) % 32 / 4;
  }
  __device__ __forceinline__ int column_of(int part, int t) const {
    return half * (kRows / kColumnWarps) + part * 16 + t * 8 +
           static_cast<int>(threadIdx.x) % 4 * 2;
  }

  __device__ __forceinline__ void add(const Shared& shared, const typename Shared::Stage& stage) {
    uint32_t a[2][kSsdSlice / 16][4];
    float factors[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int k = 0; k < kSsdSlice / 16; ++k)
        load_fragment_rows(a[i][k], stage.values + (row + 16 * i) * kSsdSliceStride + 16 * k,
                           kSsdSliceStride);
#pragma unroll
      for (int h = 0; h < 2; ++h) factors[i][h] = stage.factors[row_of(i, h)];
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      float fresh[2][2][4] = {};
#pragma unroll
      for (int k = 0; k < kSsdSlice / 16; ++k) {
        uint32_t b[4];
        load_fragment_columns(
            b,
            stage.states + (half * (kRows / kColumnWarps) + part * 16) * kSsdSliceStride + 16 * k,
            kSsdSliceStride);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          fragment_product(fresh[i][0], a[i][k], b[0], b[1]);
          fragment_product(fresh[i][1], a[i][k], b[2], b[3]);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
          for (int t = 0; t < 2; ++t) {
            const float2 vector =
                load_pair(shared.vectors + row_of(i, h) * Shared::kStride + column_of(part, t));
            const float first = factors[i][h] * fresh[i][t][2 * h];
            const float second = factors[i][h] * fresh[i][t][2 * h + 1];
            total[i][2 * part + t][2 * h] += first;
            total[i][2 * part + t][2 * h + 1] += second;
            dots[i][h] += first * vector.x + second * vector.y;
          }
        }
      }
    }
  }
  /// Leaves the head's dots in shared memory.
  __device__ __forceinline__ void give_dots(Shared& shared) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float dot = sum_lanes<4>(dots[i][h]);
        if (threadIdx.x % 4 == 0) shared.dots[half][row_of(i, h)] = dot;
        dots[i][h] = 0;
      }
    }
  }
  __device__ __forceinline__ void write(float* to) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int j = 0; j < 2 * kParts; ++j)
          *reinterpret_cast<float2*>(to + row_of(i, h) * kRows + column_of(j / 2, j % 2)) = {
              total[i][j][2 * h], total[i][j][2 * h + 1]};
      }
    }
  }
};

template <int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    sum_vectors(const __grid_constant__ SsdRows x, SsdDualSizes sizes, VectorsCall call) {
  using Shared = VectorsShared<kRows>;
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  wait_for_earlier();
  const SsdChunk chunk(x, static_cast<int>(blockIdx.x));
  const BlockHeads heads(sizes, static_cast<int>(blockIdx.y));
  copy_part<kSsdRows, kRows, Shared::kStride, kThreads>(
      shared.vectors, group_rows(x, call.vectors, chunk, heads.group));
  VectorTile<kRows> tile;
  const int steps = heads.steps();
  const auto load = [&](int step) {
    if (step < steps)
      load_stage<kRows>(shared.stages[step % kStages], x, call, sizes, chunk, heads.head(step),
                        heads.part(step));
    commit_copies();
  };
  for (int step = 0; step < kStages - 1; ++step) load(step);
  for (int step = 0; step < steps; ++step) {
    wait_copies<kStages - 2>();
    __syncthreads();
    load(step + kStages - 1);
    tile.add(shared, shared.stages[step % kStages]);
    if (heads.part(step) + 1 < heads.of_head) continue;
    tile.give_dots(shared);
    __syncthreads();
    if (threadIdx.x < kSsdRows)
      call.dots[chunk.rows_at(x, heads.head(step)) + threadIdx.x] =
          shared.dots[0][threadIdx.x] + shared.dots[1][threadIdx.x];
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
