// The rows of y, and of the gradient of x, which is the same with B and C, rows and columns turned:
// what the state gives, and the chunk's square times its values. A warpgroup has half a chunk's
// rows; its warps make their parts of the square in registers, where the products take them from.
#include "ops/cuda/ptx/bulk_copy.cuh"
#include "ops/cuda/ptx/register_product.cuh"
#include "ops/ssd_scan/ssd_dual.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSlices = 8;  // at most, of a block, one after the other
constexpr int kHalfTiles = kSsdTileRows / 2;
static_assert(kThreads / 32 == kSsdTileRows);

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
    alignas(1024) BFloat16 values[kSsdRows * kSsdSlice];  // swizzled
    alignas(1024) BFloat16 states[kRows * kSsdSlice];     // likewise
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

/// A warp's row of tiles of a slice.
template <int kRows, bool kReverse>
struct RowTile {
  using Shared = RowsShared<kRows>;
  using Stage = typename Shared::Stage;
  static constexpr TileMajor kMajor = TileMajor::kOther;
  uint32_t vectors[kRows / 16][4];
  float sums[kSsdSlice / 2];
  int tile = static_cast<int>(threadIdx.x) / 32;
  bool is_second_half = tile >= kHalfTiles;

  __device__ __forceinline__ void load_vectors(const Shared& shared) {
#pragma unroll
    for (int k = 0; k < kRows / 16; ++k)
      load_fragment_rows(vectors[k], shared.vectors + tile * kSsdTile * Shared::kStride + k * 16,
                         Shared::kStride);
  }
  __device__ __forceinline__ int row(int half) const {
    return tile * kSsdTile + half * 8 + static_cast<int>(threadIdx.x) % 32 / 4;
  }

  __device__ __forceinline__ void start_states(const Stage& stage) {
    const uint64_t states = describe_tile<kMajor>(stage.states, 0);
    begin_products();
#pragma unroll
    for (int k = 0; k < kRows / 16; ++k)
      RegisterProduct<kSsdSlice, kMajor>::run(sums, vectors[k], states + k * kNextReduction<kMajor>,
                                              k > 0);
    commit_products();
  }
  __device__ __forceinline__ void finish_states(const Stage& stage) {
    wait_products<0>();
    fence_values(sums);
    const float factors[2] = {stage.factors[row(0)], stage.factors[row(1)]};
#pragma unroll
    for (int i = 0; i < kSsdSlice / 2; ++i) sums[i] *= factors[i / 2 % 2];
  }

  /// Half a tile of the square: products times decays and steps, of columns or, where turned, of
  /// rows; D is on its diagonal.
  __device__ __forceinline__ float4 make_half(const float* products, const Stage& stage, float skip,
                                              int j, int half) const {
    const int column = j * kSsdTile + half * 8 + static_cast<int>(threadIdx.x) % 4 * 2;
    const int at = kReverse ? tile_at(j, tile, half) : tile_at(tile, j, half);
    float4 square = *reinterpret_cast<const float4*>(products + at);
    const float2 of_columns = *reinterpret_cast<const float2*>(stage.sums + column);
    const float of_rows[2] = {stage.sums[row(0)], stage.sums[row(1)]};
    const float2 step = *reinterpret_cast<const float2*>(stage.steps + column);
    const auto decay = [&](int h, float of_column, float of_step) {
      return kReverse ? decay_between(of_column, of_rows[h]) * stage.steps[row(h)]
                      : decay_between(of_rows[h], of_column) * of_step;
    };
    square.x *= decay(0, of_columns.x, step.x);
    square.y *= decay(0, of_columns.y, step.y);
    square.z *= decay(1, of_columns.x, step.x);
    square.w *= decay(1, of_columns.y, step.y);
    if (j == tile) {
      if (row(0) == column) square.x += skip;
      if (row(0) == column + 1) square.y += skip;
      if (row(1) == column) square.z += skip;
      if (row(1) == column + 1) square.w += skip;
    }
    return square;
  }
  /// Half the columns' tiles as operands, of which those on the other side of the diagonal are 0.
  /// `rest`: of a tile on the diagonal, where D and a token's own product may all but cancel, what
  /// rounding leaves.
  __device__ __forceinline__ void make_squares(uint32_t (&a)[kHalfTiles][4], uint32_t (&rest)[4],
                                               const float* products, const Stage& stage,
                                               float skip, int first) const {
#pragma unroll
    for (int i = 0; i < kHalfTiles; ++i) {
      const int j = first + i;
      if (kReverse ? j < tile : j > tile) {
#pragma unroll
        for (int e = 0; e < 4; ++e) a[i][e] = 0;
        continue;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 four = make_half(products, stage, skip, j, half);
        a[i][2 * half] = pack_pair(four.x, four.y);
        a[i][2 * half + 1] = pack_pair(four.z, four.w);
        if (j == tile) {
          rest[2 * half] = pack_rest(four.x, four.y, a[i][2 * half]);
          rest[2 * half + 1] = pack_rest(four.z, four.w, a[i][2 * half + 1]);
        }
      }
    }
  }
  __device__ __forceinline__ void start_values(const uint32_t (&a)[kHalfTiles][4],
                                               const Stage& stage, int first) {
    const uint64_t values = describe_tile<kMajor>(stage.values + first * kSsdTile * kSsdSlice, 0);
    begin_products();
#pragma unroll
    for (int i = 0; i < kHalfTiles; ++i)
      RegisterProduct<kSsdSlice, kMajor>::run(sums, a[i], values + i * kNextReduction<kMajor>,
                                              true);
    commit_products();
  }
  /// The rest of the warp's tile on the diagonal times values of its own.
  __device__ __forceinline__ void add_rest(const uint32_t (&rest)[4], const Stage& stage) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const BFloat16* line = stage.values + (tile * kSsdTile + lane % 16) * kSsdSlice;
#pragma unroll
    for (int p = 0; p < kSsdSlice / 16; ++p) {
      uint32_t b[4];
      load_fragment<true>(b, line + ((p * 16 + lane / 16 * 8) ^ lane % 8 * 8));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float own[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) own[e] = sums[8 * p + 4 * half + e];
        fragment_product(own, rest, b[2 * half], b[2 * half + 1]);
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[8 * p + 4 * half + e] = own[e];
      }
    }
  }

  __device__ __forceinline__ void multiply(const float* products, const Stage& stage, float skip) {
    start_states(stage);
    // The half of the columns with the diagonal, then, for one half of the rows, the other.
    const int own = is_second_half ? kHalfTiles : 0;
    uint32_t a[kHalfTiles][4];
    uint32_t rest[4];
    make_squares(a, rest, products, stage, skip, own);
    finish_states(stage);
    start_values(a, stage, own);
    wait_products<0>();
    fence_values(sums);
    if (is_second_half != kReverse) {
      make_squares(a, rest, products, stage, skip, kHalfTiles - own);
      start_values(a, stage, kHalfTiles - own);
      wait_products<0>();
      fence_values(sums);
    }
    add_rest(rest, stage);
  }
  __device__ __forceinline__ void write(const SsdPart& to) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = row(half);
#pragma unroll
      for (int four = 0; four < kSsdSlice / 32; ++four) {
        const uint4 line = turn_quads(pack_tiles(sums + 16 * four, half));
        const int column = 32 * four + static_cast<int>(threadIdx.x) % 4 * 8;
        if (own < to.rows && column < to.columns)
          *reinterpret_cast<uint4*>(const_cast<BFloat16*>(to.data) + own * to.stride + column) =
              line;
      }
    }
  }
};

template <int kRows, bool kReverse>
__global__ void __launch_bounds__(kThreads, 2)
    give_rows(const __grid_constant__ SsdRows x, SsdDual scratch, SsdDualSizes sizes,
              RowsCall call) {
  using Shared = RowsShared<kRows>;
  extern __shared__ __align__(1024) unsigned char memory[];
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
  RowTile<kRows, kReverse> tile;
  tile.load_vectors(shared);
  const auto load = [&](int slice) {
    auto& stage = shared.stages[slice % 2];
    const int head = slice / sizes.head_slices;
    copy_swizzled<kSsdRows, kThreads>(
        stage.values, slice_rows(x, call.values, chunk, head, slice % sizes.head_slices));
    const int64_t at =
        (static_cast<int64_t>(chunk.idx) * sizes.slices + slice) * sizes.state_values;
    copy_swizzled<kRows, kThreads>(stage.states,
                                   {bf16(call.states) + at, kSsdSlice, kRows, kSsdSlice});
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
    fence_shared_for_async();
    __syncthreads();
    if (slice + 1 < end) load(slice + 1);
    tile.multiply(shared.products, stage, skip);
    tile.write(slice_rows(x, call.to, chunk, head, slice % sizes.head_slices));
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
