// The rows of y, and of the gradient of x, which is the same with B and C, rows and columns turned:
// what the state gives, and the chunk's square times its values. A warp has two tiles of rows, of
// which one has many tiles of the triangle where the other has few.
#include "ops/ssd_scan/ssd_dual.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kSlices = 8;  // at most, of a block, one after the other
constexpr int kPairs = kSsdSlice / 16;
static_assert(kThreads / 32 * 2 == kSsdTileRows);

struct RowsCall {
  const void* vectors;    ///< what reads states: [T,G,N]
  const void* values;     ///< [T,H,P]
  const void* states;     ///< BF16 [chunks, slices, rows, 64]
  const float* products;  ///< squares of groups
  const float* factors;   ///< rows of chunks: of what states give
  void* to;               ///< [T,H,P]
};

template <int kRows>
struct RowsShared {
  static constexpr int kStride = kRows + kSsdPadding;
  struct Stage {
    BFloat16 values[kSsdRows * kSsdSliceStride];
    BFloat16 states[kRows * kSsdSliceStride];
    float sums[kSsdRows];
    float steps[kSsdRows];
    float factors[kSsdRows];
  };
  union {
    BFloat16 vectors[kSsdRows * kStride];  // at first
    Stage stages[2];
  };
  float products[kSsdTriangle];
};

/// What the rounding of a pair left.
__device__ __forceinline__ uint32_t pack_rest(float first, float second, uint32_t rounded) {
  const float2 pair = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&rounded));
  return pack_pair(first - pair.x, second - pair.y);
}

/// A warp's rows of a slice.
template <int kRows, bool kReverse>
struct RowTiles {
  using Shared = RowsShared<kRows>;
  using Stage = typename Shared::Stage;
  uint32_t vectors[2][kRows / 16][4];
  float sums[2][2 * kPairs][4];
  int tiles[2];  // the one with more tiles of the triangle first

  __device__ __forceinline__ RowTiles() {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    tiles[0] = kReverse ? warp : kSsdTileRows - 1 - warp;
    tiles[1] = kSsdTileRows - 1 - tiles[0];
  }
  __device__ __forceinline__ void load_vectors(const Shared& shared) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int k = 0; k < kRows / 16; ++k)
        load_fragment_rows(vectors[i][k],
                           shared.vectors + tiles[i] * kSsdTile * Shared::kStride + k * 16,
                           Shared::kStride);
    }
  }
  __device__ __forceinline__ int row(int i, int half) const {
    return tiles[i] * kSsdTile + half * 8 + static_cast<int>(threadIdx.x) % 32 / 4;
  }

  __device__ __forceinline__ void read_states(const Stage& stage) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * kPairs; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[i][j][e] = 0;
      }
    }
#pragma unroll
    for (int k = 0; k < kRows / 16; ++k) {
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        uint32_t b[4];
        load_fragment_columns_across(b, stage.states + k * 16 * kSsdSliceStride + p * 16,
                                     kSsdSliceStride);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          fragment_product(sums[i][2 * p], vectors[i][k], b[0], b[1]);
          fragment_product(sums[i][2 * p + 1], vectors[i][k], b[2], b[3]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float factor = stage.factors[row(i, half)];
#pragma unroll
        for (int j = 0; j < 2 * kPairs; ++j) {
          sums[i][j][2 * half] *= factor;
          sums[i][j][2 * half + 1] *= factor;
        }
      }
    }
  }

  /// Half a tile of the square: products times decays and steps, of columns or, where turned, of
  /// rows; D is on its diagonal.
  __device__ __forceinline__ float4 make_square(const float* products, const Stage& stage,
                                                float skip, int i, int j, int half) const {
    const int tile = tiles[i];
    const int column = j * kSsdTile + half * 8 + static_cast<int>(threadIdx.x) % 4 * 2;
    const int at = kReverse ? tile_at(j, tile, half) : tile_at(tile, j, half);
    float4 square = *reinterpret_cast<const float4*>(products + at);
    const float2 of_columns = *reinterpret_cast<const float2*>(stage.sums + column);
    const float of_rows[2] = {stage.sums[row(i, 0)], stage.sums[row(i, 1)]};
    const float2 step = *reinterpret_cast<const float2*>(stage.steps + column);
    const auto decay = [&](int h, float of_column, float of_step) {
      return kReverse ? decay_between(of_column, of_rows[h]) * stage.steps[row(i, h)]
                      : decay_between(of_rows[h], of_column) * of_step;
    };
    square.x *= decay(0, of_columns.x, step.x);
    square.y *= decay(0, of_columns.y, step.y);
    square.z *= decay(1, of_columns.x, step.x);
    square.w *= decay(1, of_columns.y, step.y);
    if (j == tile) {
      if (row(i, 0) == column) square.x += skip;
      if (row(i, 0) == column + 1) square.y += skip;
      if (row(i, 1) == column) square.z += skip;
      if (row(i, 1) == column + 1) square.w += skip;
    }
    return square;
  }
  __device__ __forceinline__ void add_tile(int i, const uint32_t (&a)[4],
                                           const uint32_t (&b)[kPairs][4]) {
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      fragment_product(sums[i][2 * p], a, b[p][0], b[p][1]);
      fragment_product(sums[i][2 * p + 1], a, b[p][2], b[p][3]);
    }
  }
  /// Of tiles on the diagonal, where D and a token's own product may all but cancel, also what
  /// rounding leaves.
  __device__ __forceinline__ void add_values(const float* products, const Stage& stage,
                                             float skip) {
    const int first = kReverse ? tiles[0] : 0;
    const int last = kReverse ? kSsdTileRows - 1 : tiles[0];
    for (int j = first; j <= last; ++j) {
      uint32_t b[kPairs][4];
#pragma unroll
      for (int p = 0; p < kPairs; ++p)
        load_fragment_columns_across(b[p], stage.values + j * kSsdTile * kSsdSliceStride + p * 16,
                                     kSsdSliceStride);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (i == 1 && (kReverse ? j < tiles[1] : j > tiles[1])) continue;
        const float4 left = make_square(products, stage, skip, i, j, 0);
        const float4 right = make_square(products, stage, skip, i, j, 1);
        const uint32_t a[4] = {pack_pair(left.x, left.y), pack_pair(left.z, left.w),
                               pack_pair(right.x, right.y), pack_pair(right.z, right.w)};
        add_tile(i, a, b);
        if (j != tiles[i]) continue;
        const uint32_t rest[4] = {pack_rest(left.x, left.y, a[0]), pack_rest(left.z, left.w, a[1]),
                                  pack_rest(right.x, right.y, a[2]),
                                  pack_rest(right.z, right.w, a[3])};
        add_tile(i, rest, b);
      }
    }
  }
  __device__ __forceinline__ void write(const SsdPart& to) const {
    const int lane_column = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int own = row(i, half);
        if (own >= to.rows) continue;
        BFloat16* line = const_cast<BFloat16*>(to.data) + own * to.stride + lane_column;
#pragma unroll
        for (int j = 0; j < 2 * kPairs; ++j) {
          if (8 * j < to.columns)
            store_pair(line + 8 * j, sums[i][j][2 * half], sums[i][j][2 * half + 1]);
        }
      }
    }
  }
};

template <int kRows, bool kReverse>
__global__ void __launch_bounds__(kThreads, 2)
    give_rows(const __grid_constant__ SsdRows x, SsdDual scratch, SsdDualSizes sizes,
              RowsCall call) {
  using Shared = RowsShared<kRows>;
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  wait_for_earlier();
  const SsdChunk chunk(x, static_cast<int>(blockIdx.x));
  const int of_group = sizes.group_heads * sizes.head_slices;
  const int blocks = (of_group + kSlices - 1) / kSlices;
  const int group = static_cast<int>(blockIdx.y) / blocks;
  const int begin = group * of_group + static_cast<int>(blockIdx.y) % blocks * kSlices;
  const int end = min(begin + kSlices, (group + 1) * of_group);
  copy_part<kSsdRows, kRows, Shared::kStride, kThreads>(shared.vectors,
                                                        group_rows(x, call.vectors, chunk, group));
  copy_floats<kSsdTriangle, kThreads>(
      shared.products,
      call.products + (static_cast<int64_t>(chunk.idx) * x.groups + group) * kSsdTriangle);
  commit_copies();
  wait_copies<0>();
  __syncthreads();
  RowTiles<kRows, kReverse> tiles;
  tiles.load_vectors(shared);
  const auto load = [&](int slice) {
    auto& stage = shared.stages[slice % 2];
    const int head = slice / sizes.head_slices;
    copy_part<kSsdRows, kSsdSlice, kSsdSliceStride, kThreads>(
        stage.values, slice_rows(x, call.values, chunk, head, slice % sizes.head_slices));
    const int64_t at =
        (static_cast<int64_t>(chunk.idx) * sizes.slices + slice) * sizes.state_values;
    copy_part<kRows, kSsdSlice, kSsdSliceStride, kThreads>(
        stage.states, {bf16(call.states) + at, kSsdSlice, kRows, kSsdSlice});
    const int64_t rows_at = chunk.rows_at(x, head);
    copy_floats<kSsdRows, kThreads>(stage.sums, scratch.sums + rows_at);
    copy_floats<kSsdRows, kThreads>(stage.steps, scratch.steps + rows_at);
    copy_floats<kSsdRows, kThreads>(stage.factors, call.factors + rows_at);
    commit_copies();
  };
  __syncthreads();
  load(begin);
  for (int slice = begin; slice < end; ++slice) {
    const auto& stage = shared.stages[slice % 2];
    const int head = slice / sizes.head_slices;
    const float skip = x.skip[head];
    wait_copies<0>();
    __syncthreads();
    if (slice + 1 < end) load(slice + 1);
    tiles.read_states(stage);
    tiles.add_values(shared.products, stage, skip);
    tiles.write(slice_rows(x, call.to, chunk, head, slice % sizes.head_slices));
  }
}

template <int kRows, bool kReverse>
void launch(const SsdRows& x, const SsdDual& scratch, const RowsCall& call, cudaStream_t stream) {
  const SsdDualSizes sizes = sizes_of(x);
  const int64_t blocks = divide_up(int64_t{sizes.group_heads} * sizes.head_slices, kSlices);
  launch_dual(give_rows<kRows, kReverse>,
              dim3(static_cast<unsigned>(sizes.chunks), static_cast<unsigned>(x.groups * blocks)),
              kThreads, sizeof(RowsShared<kRows>), stream, x, scratch, sizes, call);
}

}  // namespace

void launch_ssd_dual_rows(const SsdRows& x, const SsdDual& scratch, const SsdDualBackward* backward,
                          const void* grad, void* to, cudaStream_t stream) {
  with_state_rows(sizes_of(x), [&]<int kRows>() {
    if (backward == nullptr) {
      launch<kRows, false>(x, scratch,
                           {.vectors = x.c,
                            .values = x.x,
                            .states = scratch.states,
                            .products = scratch.products,
                            .factors = scratch.reads,
                            .to = to},
                           stream);
    } else {
      launch<kRows, true>(x, scratch,
                          {.vectors = x.b,
                           .values = grad,
                           .states = backward->state_grads,
                           .products = backward->turned,
                           .factors = scratch.writes,
                           .to = to},
                          stream);
    }
  });
}

}  // namespace tessera::cuda
