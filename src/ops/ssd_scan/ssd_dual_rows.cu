// The rows of y, and of the gradient of x, which is the same with B and C, rows and columns turned:
// what the state gives, and the chunk's square times its values. A warp has two tiles of rows, of
// which one has many tiles of the triangle where the other has few.
#include "ops/ssd_scan/ssd_dual.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kSlices = 8;  // at most, of a block, one after the other
constexpr int kPairs = kSsdSlice / 16;
static_assert(kThreads / 32 * 2 == kSsdTileRows && kThreads == kSsdRows);

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
  union {
    BFloat16 vectors[kSsdRows * kStride];  // at first
    struct {
      BFloat16 values[kSsdRows * kSsdSliceStride];
      BFloat16 states[kRows * kSsdSliceStride];
    };
  };
  float products[kSsdTriangle];
  float sums[kSsdRows];
  float steps[kSsdRows];
  float factors[kSsdRows];
};

/// A warp's rows of a slice.
template <int kRows, bool kReverse>
struct RowTiles {
  using Shared = RowsShared<kRows>;
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

  __device__ __forceinline__ void read_states(const Shared& shared) {
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
        load_fragment_columns_across(b, shared.states + k * 16 * kSsdSliceStride + p * 16,
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
        const float factor = shared.factors[row(i, half)];
#pragma unroll
        for (int j = 0; j < 2 * kPairs; ++j) {
          sums[i][j][2 * half] *= factor;
          sums[i][j][2 * half + 1] *= factor;
        }
      }
    }
  }

  /// A tile of the square: products times decays, and steps of the columns on the way forward.
  __device__ __forceinline__ void make_square(uint32_t (&a)[4], const Shared& shared, int i,
                                              int j) const {
    const int tile = tiles[i];
    const float first = shared.sums[row(i, 0)];
    const float second = shared.sums[row(i, 1)];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = j * kSsdTile + half * 8 + static_cast<int>(threadIdx.x) % 4 * 2;
      const int at = kReverse ? tile_at(j, tile, half) : tile_at(tile, j, half);
      const float4 product = *reinterpret_cast<const float4*>(shared.products + at);
      const float2 of_columns = *reinterpret_cast<const float2*>(shared.sums + column);
      const auto decay = [&](float of_row, float of_column) {
        return kReverse ? decay_between(of_column, of_row) : decay_between(of_row, of_column);
      };
      float2 step = {1, 1};
      if (!kReverse) step = *reinterpret_cast<const float2*>(shared.steps + column);
      a[2 * half] = pack_pair(product.x * decay(first, of_columns.x) * step.x,
                              product.y * decay(first, of_columns.y) * step.y);
      a[2 * half + 1] = pack_pair(product.z * decay(second, of_columns.x) * step.x,
                                  product.w * decay(second, of_columns.y) * step.y);
    }
  }
  __device__ __forceinline__ void add_values(const Shared& shared) {
    const int first = kReverse ? tiles[0] : 0;
    const int last = kReverse ? kSsdTileRows - 1 : tiles[0];
    for (int j = first; j <= last; ++j) {
      uint32_t b[kPairs][4];
#pragma unroll
      for (int p = 0; p < kPairs; ++p)
        load_fragment_columns_across(b[p], shared.values + j * kSsdTile * kSsdSliceStride + p * 16,
                                     kSsdSliceStride);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (i == 1 && (kReverse ? j < tiles[1] : j > tiles[1])) continue;
        uint32_t a[4];
        make_square(a, shared, i, j);
#pragma unroll
        for (int p = 0; p < kPairs; ++p) {
          fragment_product(sums[i][2 * p], a, b[p][0], b[p][1]);
          fragment_product(sums[i][2 * p + 1], a, b[p][2], b[p][3]);
        }
      }
    }
  }
  /// With D times the values, to global memory.
  __device__ __forceinline__ void write(const Shared& shared, float skip, const SsdPart& to) const {
    const int lane_column = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int own = row(i, half);
        if (own >= to.rows) continue;
        const float step = kReverse ? shared.steps[own] : 1.0F;
        const BFloat16* values = shared.values + own * kSsdSliceStride + lane_column;
        BFloat16* line = const_cast<BFloat16*>(to.data) + own * to.stride + lane_column;
#pragma unroll
        for (int j = 0; j < 2 * kPairs; ++j) {
          if (8 * j >= to.columns) continue;
          const float2 value = load_pair(values + 8 * j);
          store_pair(line + 8 * j, step * sums[i][j][2 * half] + skip * value.x,
                     step * sums[i][j][2 * half + 1] + skip * value.y);
        }
      }
    }
  }
};

template <int kRows, bool kReverse>
__global__ void __launch_bounds__(kThreads, 3)
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
  for (int slice = begin; slice < end; ++slice) {
    const int head = slice / sizes.head_slices;
    const int part = slice % sizes.head_slices;
    const SsdPart values = slice_rows(x, call.values, chunk, head, part);
    const BFloat16* states =
        bf16(call.states) +
        (static_cast<int64_t>(chunk.idx) * sizes.slices + slice) * sizes.state_values;
    __syncthreads();
    copy_part<kSsdRows, kSsdSlice, kSsdSliceStride, kThreads>(shared.values, values);
    copy_part<kRows, kSsdSlice, kSsdSliceStride, kThreads>(shared.states,
                                                           {states, kSsdSlice, kRows, kSsdSlice});
    commit_copies();
    const int64_t rows_at = chunk.rows_at(x, head) + threadIdx.x;
    shared.sums[threadIdx.x] = scratch.sums[rows_at];
    shared.steps[threadIdx.x] = scratch.steps[rows_at];
    shared.factors[threadIdx.x] = call.factors[rows_at];
    const float skip = x.skip[head];
    wait_copies<0>();
    __syncthreads();
    tiles.read_states(shared);
    tiles.add_values(shared);
    tiles.write(shared, skip, slice_rows(x, call.to, chunk, head, part));
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
                           .factors = scratch.ends,
                           .to = to},
                          stream);
    }
  });
}

}  // namespace tessera::cuda
