// The gradient of the experts' matrices on Hopper's tensor cores: the sum over an expert's tokens
// of the products of a narrow and a wide row. Both operands are read as they lie, tokens along the
// reduction. Persistent clusters of two blocks that take neighbouring rows of the gradient and
// share the wide operand; one warpgroup feeds the copy engine and two multiply.
//
// Where experts have few tokens, the gradient's F32 values take longer than the products. They are
// read and written as whole lines of the cache, half as many requests as the accumulators' order
// would make, and what is added to is read before the last products end.
#include <cuda_bf16.h>

#include "ops/cuda/bulk_copy.cuh"
#include "ops/cuda/check.h"
#include "ops/cuda/warpgroup_product.cuh"
#include "ops/grouped_matmul/grouped_gather.cuh"
#include "ops/grouped_matmul/grouped_kernels.h"
#include "ops/grouped_matmul/grouped_tiles.cuh"

namespace tessera::cuda {
namespace {

constexpr int kRows = 128;     // of the gradient, of a block: 64 of each warpgroup
constexpr int kColumns = 256;  // of the gradient
constexpr int kTokens = kGroupedReduction;
constexpr int kStages = 4;
constexpr int kLineColumns = 32;  // of a line of the cache, which 8 lanes hold
constexpr int kLineGroups = kColumns / kLineColumns;
constexpr int kOwnLines = 4;           // of a group, in which a thread holds four columns
constexpr int kGroupsAhead = 4;        // that are read before they are added to
constexpr int kStagesToAddThere = 12;  // the L2 cache takes longer to add than shorter products
constexpr int kMaxExperts = kGroupedMaxExperts;
constexpr int kWarpgroup = 128;
constexpr int kThreads = 3 * kWarpgroup;
constexpr int kTile = 64 * kTokens;  // values of one copy

using Value = __nv_bfloat16;
using Params = GroupedWgradParams;

struct Stage {
  Value narrow[kRows / 64][kTile];
  Value wide[kColumns / 64][kTile];
};

/// What a cluster multiplies in one step; the rows of its first block begin at `row`.
struct Work {
  int expert;
  int row;  // in the expert's block
  int num_rows;
  int column;
  int block_begin;
  int first_token;
  int num_tokens;
  int num_stages;
};

struct Shared {
  Stage stages[kStages];
  Barrier full[kStages];
  Barrier empty[kStages];
  WorkSlot<Work> slot;
  int tile_begin[kMaxExperts + 1];
  Barrier landed[kStages];  // of gathered tokens
};
static_assert(sizeof(Shared) <= 227 * 1024);

struct Plan {
  const Params& params;
  GroupedTiles tiles;

  __device__ int rows(int expert) const {
    return params.block_begin[expert + 1] - params.block_begin[expert];
  }
  __device__ int pairs(int expert) const { return (rows(expert) + 2 * kRows - 1) / (2 * kRows); }
  __device__ int column_tiles() const { return (params.num_columns + kColumns - 1) / kColumns; }

  __device__ Work work(int tile) const {
    const int expert = tiles.expert_of(tile);
    const GroupedTile at = tiles.locate(tile, column_tiles(), pairs(expert), expert);
    const int first = static_cast<int>(params.offsets[expert]);
    const int num_tokens = static_cast<int>(params.offsets[expert + 1]) - first;
    return {.expert = expert,
            .row = 2 * at.minor * kRows,
            .num_rows = rows(expert),
            .column = at.major * kColumns,
            .block_begin = params.block_begin[expert],
            .first_token = first,
            .num_tokens = num_tokens,
            .num_stages = (num_tokens + kTokens - 1) / kTokens};
  }
};

/// What the block of this rank does of the cluster's work.
__device__ Work own_part(Work work, uint32_t rank) {
  work.row += static_cast<int>(rank) * kRows;
  return work;
}

using Cursor = RingCursor<kStages>;

constexpr int kOwnTiles = kColumns / 64 / 2;  // of the wide operand, that one block gathers
constexpr uint32_t kOwnBytes = kOwnTiles * sizeof(Stage::wide[0]);

template <bool kGathers>
__device__ void produce(Shared& shared, const Params& params, uint32_t rank) {
  Cursor cursor;
  uint32_t turn = 0;
  for (;;) {
    const Work work = own_part(shared.slot.take(turn), rank);
    if (work.expert < 0) return;
    for (int s = 0; s < work.num_stages; ++s) {
      Stage& stage = shared.stages[cursor.stage];
      Barrier* const full = &shared.full[cursor.stage];
      const int token = work.first_token + s * kTokens;
      shared.empty[cursor.stage].wait(cursor.parity ^ 1);
      full->arrive_and_expect(sizeof(Stage) - (kGathers ? kOwnBytes : 0));
      for (int i = 0; i < kRows / 64; ++i)
        load_box(stage.narrow[i], &params.narrow, {work.row + i * 64, token}, full);
      if constexpr (!kGathers) {
        for (int i = rank; i < kColumns / 64; i += 2)
          load_box_to_all(stage.wide[i], &params.wide, {work.column + i * 64, token}, full, 3);
      }
      cursor.advance();
    }
  }
}

/// By one warp: copies this block's tiles of the wide operand of all stages. Where the next
/// stage's tokens are is read before this one's are copied, and waited for after.
__device__ void gather(Shared& shared, const Params& params, uint32_t rank) {
  Cursor cursor;
  uint32_t turn = 0;
  for (;;) {
    const Work work = shared.slot.take_in_warp(turn);
    if (work.expert < 0) return;
    const int column = work.column + static_cast<int>(rank) * kOwnTiles * 64;
    const GatheredColumns columns = {static_cast<const Value*>(params.tokens) + column,
                                     params.num_columns - column,
                                     params.num_columns * static_cast<uint32_t>(sizeof(Value))};
    const auto sources_of = [&](int s) {
      return load_sources<kTokens>(params, work.first_token + s * kTokens,
                                   work.num_tokens - s * kTokens);
    };
    auto sources = sources_of(0);
    for (int s = 0; s < work.num_stages; ++s) {
      const auto tokens = tokens_of(sources, params.top_k);
      sources = sources_of(s + 1);
      shared.empty[cursor.stage].wait(cursor.parity ^ 1);
      copy_rows<kOwnTiles, kTokens>(shared.stages[cursor.stage].wide[rank * kOwnTiles], columns,
                                    tokens, kTokens);
      arrive_when_copied(&shared.landed[cursor.stage]);
      cursor.advance();
    }
  }
}

/// By one thread: gives gathered tiles to both blocks.
__device__ void forward_gathered(Shared& shared, uint32_t rank) {
  Cursor cursor;
  uint32_t turn = 0;
  for (;;) {
    const Work work = shared.slot.take(turn);
    if (work.expert < 0) return;
    for (int s = 0; s < work.num_stages; ++s) {
      shared.landed[cursor.stage].wait(cursor.parity);
      forward(shared.stages[cursor.stage].wide[rank * kOwnTiles], kOwnBytes,
              &shared.full[cursor.stage], rank);
      cursor.advance();
    }
  }
}

/// Makes the rows of tokens from num_tokens on zero in `num_tiles` tiles, by one warpgroup.
__device__ void clear_rows(Value* first_tile, int num_tiles, int num_tokens) {
  constexpr int kChunks = sizeof(Value) * 64 / sizeof(uint4);
  auto* const tiles = reinterpret_cast<uint4*>(first_tile);
  const int per_tile = (kTokens - num_tokens) * kChunks;
  for (int i = threadIdx.x % kWarpgroup; i < per_tile * num_tiles; i += kWarpgroup)
    tiles[i / per_tile * (kTokens * kChunks) + num_tokens * kChunks + i % per_tile] = uint4{};
}

/// Clears the rows of tokens that are not the expert's, in both operands: a value times zero is not
/// zero if it is not finite. The first warpgroup clears what both read, which is zero if gathered.
template <bool kGathers>
__device__ void clear_tail(Stage& stage, int num_tokens, int group) {
  clear_rows(stage.narrow[group], 1, num_tokens);
  if (!kGathers && group == 0) clear_rows(stage.wide[0], kColumns / 64, num_tokens);
  fence_shared_for_async();
  sync_threads(4, 2 * kWarpgroup);
}

/// Where a thread's values of a tile go: the first one, and how many columns there are from it on
/// in each of its lines, none outside the expert's block.
struct Place {
  float* to;
  int num_columns[kOwnLines];
};

/// A thread's lines follow one another by pairs of rows, the second pair 8 rows after the first.
__device__ __forceinline__ int row_of_line(int line) {
  return line / 2 * 8 + line % 2;
}

__device__ __forceinline__ Place place_of(const Params& params, const Work& work, int group) {
  const int lane = threadIdx.x % 32;
  const int row = work.row + group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 8 * 2;
  const int column = work.column + lane % 8 / 4 * 16 + lane % 2 * 8 + lane % 4 / 2 * 4;
  const int left = params.num_columns - column;
  Place place{params.grad + int64_t{work.block_begin + row} * params.num_columns + column, {}};
#pragma unroll
  for (int line = 0; line < kOwnLines; ++line)
    place.num_columns[line] = row + row_of_line(line) < work.num_rows ? left : 0;
  return place;
}

__device__ __forceinline__ float4* address(const Params& params, const Place& place, int line,
                                           int column) {
  return reinterpret_cast<float4*>(place.to + column +
                                   int64_t{row_of_line(line)} * params.num_columns);
}

__device__ __forceinline__ float4 exchange(float4 value, int lanes) {
  return {__shfl_xor_sync(~0u, value.x, lanes), __shfl_xor_sync(~0u, value.y, lanes),
          __shfl_xor_sync(~0u, value.z, lanes), __shfl_xor_sync(~0u, value.w, lanes)};
}

/// Four columns of one of two blocks of 8, of each of which this thread has two: neighbouring lanes
/// exchange halves.
__device__ __forceinline__ float4 join(const float* a, const float* b) {
  const bool is_odd = threadIdx.x % 2 == 1;
  const float2 keep = is_odd ? make_float2(b[0], b[1]) : make_float2(a[0], a[1]);
  const float2 give = is_odd ? make_float2(a[0], a[1]) : make_float2(b[0], b[1]);
  const float2 got = {__shfl_xor_sync(~0u, give.x, 1), __shfl_xor_sync(~0u, give.y, 1)};
  return is_odd ? make_float4(got.x, got.y, keep.x, keep.y)
                : make_float4(keep.x, keep.y, got.x, got.y);
}

/// A group of 32 columns from accumulators' order (see WarpgroupProduct) to lines: lanes of two
/// neighbouring rows exchange halves, so that 8 lanes have all of one.
__device__ __forceinline__ void make_lines(const float* d, float4 (&lines)[kOwnLines]) {
  const bool is_second = threadIdx.x / 4 % 2 == 1;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float4 left = join(d + 2 * half, d + 4 + 2 * half);
    const float4 right = join(d + 8 + 2 * half, d + 12 + 2 * half);
    const float4 got = exchange(is_second ? left : right, 4);
    lines[2 * half] = is_second ? got : left;
    lines[2 * half + 1] = is_second ? right : got;
  }
}

/// What a group is added to; from the L2 cache, as no line is read twice.
__device__ __forceinline__ void load_lines(const Params& params, const Place& place, int group,
                                           float4 (&lines)[kOwnLines]) {
  const int column = group * kLineColumns;
#pragma unroll
  for (int line = 0; line < kOwnLines; ++line) {
    if (column < place.num_columns[line])
      lines[line] = __ldcg(address(params, place, line, column));
  }
}

__device__ __forceinline__ float4 add(float4 a, float4 b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

/// Adds in the L2 cache. Unlike float4's sum it takes subnormal values for zero.
__device__ __forceinline__ void add_there(float4* to, float4 value) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(value.x),
               "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
}

/// From registers, so that the next tile begins at once. Each value is written, or added to, once
/// in the grid, so that sums do not depend on an order. Calls finish(i, lines) before group i of
/// lines is written by write(place, four values).
template <typename Finish, typename Write>
__device__ __forceinline__ void store(const Params& params, const Place& place,
                                      const float (&d)[kColumns / 2], const Finish& finish,
                                      const Write& write) {
#pragma unroll
  for (int i = 0; i < kLineGroups; ++i) {
    float4 lines[kOwnLines];
    make_lines(d + i * 16, lines);
    finish(i, lines);
#pragma unroll
    for (int line = 0; line < kOwnLines; ++line) {
      const int column = i * kLineColumns;
      if (column < place.num_columns[line])
        write(address(params, place, line, column), lines[line]);
    }
  }
}

/// What a tile's first groups are added to, read while its last products run.
using Before = float4[kGroupsAhead][kOwnLines];

__device__ __forceinline__ void add_and_store(const Params& params, const Place& place,
                                              const float (&d)[kColumns / 2], Before& before) {
  const auto add_before = [&](int i, float4(&lines)[kOwnLines]) __attribute__((always_inline)) {
#pragma unroll
    for (int line = 0; line < kOwnLines; ++line)
      lines[line] = add(lines[line], before[i % kGroupsAhead][line]);
    if (i + kGroupsAhead < kLineGroups)
      load_lines(params, place, i + kGroupsAhead, before[i % kGroupsAhead]);
  };
  store(params, place, d, add_before, [](float4* to, float4 value) { *to = value; });
}

template <bool kAccumulate>
__device__ __forceinline__ void store_there(const Params& params, const Place& place,
                                            const float (&d)[kColumns / 2]) {
  store(
      params, place, d, [](int, float4(&)[kOwnLines]) {},
      [](float4* to, float4 value) {
        if constexpr (kAccumulate) {
          add_there(to, value);
        } else {
          *to = value;
        }
      });
}

template <bool kAccumulate, bool kGathers>
__device__ __forceinline__ void multiply(Shared& shared, const Params& params, const Work& work,
                                         int group, Cursor& cursor) {
  using Product = WarpgroupProduct<kColumns, TileMajor::kOther, TileMajor::kOther>;
  float d[kColumns / 2];
#pragma unroll
  for (float& value : d) value = 0;
  const int lane = threadIdx.x % kWarpgroup;
  int last = 0;
  for (int s = 0; s < work.num_stages; ++s) {
    Stage& stage = shared.stages[cursor.stage];
    uint64_t narrow = describe_tile<TileMajor::kOther>(stage.narrow[group], 0);
    uint64_t wide = describe_tile<TileMajor::kOther>(stage.wide[0], sizeof(stage.wide[0]));
    shared.full[cursor.stage].wait(cursor.parity);
    const int left = work.num_tokens - s * kTokens;
    if (left < kTokens) clear_tail<kGathers>(stage, left, group);
    begin_products();
#pragma unroll
    for (int k = 0; k < kTokens / 16; ++k) {
      Product::run(d, narrow, wide, true);
      narrow += kNextReduction<TileMajor::kOther>;
      wide += kNextReduction<TileMajor::kOther>;
    }
    commit_products();
    wait_products<1>();
    if (s > 0 && lane < 2) shared.empty[last].arrive_at(lane);
    last = cursor.stage;
    cursor.advance();
  }
  const Place place = place_of(params, work, group);
  Before before = {};
  const bool adds_here = kAccumulate && work.num_stages < kStagesToAddThere;
  if (adds_here) {
#pragma unroll
    for (int i = 0; i < kGroupsAhead; ++i) load_lines(params, place, i, before[i]);
  }
  wait_products<0>();
  fence_values(d);
  if (work.num_stages > 0 && lane < 2) shared.empty[last].arrive_at(lane);
  if (adds_here) {
    add_and_store(params, place, d, before);
  } else {
    store_there<kAccumulate>(params, place, d);
  }
}

template <bool kAccumulate, bool kGathers>
__device__ __forceinline__ void consume(Shared& shared, const Params& params, uint32_t rank) {
  Cursor cursor;
  uint32_t turn = 0;
  const int group = threadIdx.x / kWarpgroup - 1;
  for (;;) {
    const Work work = own_part(shared.slot.take_in_warp(turn), rank);
    if (work.expert < 0) break;
    multiply<kAccumulate, kGathers>(shared, params, work, group, cursor);
  }
}

/// By a warp of the cluster's first block.
__device__ void plan_work(Shared& shared, const Params& params) {
  const Plan plan{params, {shared.tile_begin, params.num_experts}};
  sum_tiles(plan.tiles, [&](int expert) {
    // An expert without tokens adds nothing, but its gradient must be written where it is not added
    // to.
    const bool has_tokens = params.offsets[expert + 1] > params.offsets[expert];
    return has_tokens || !params.accumulate ? plan.pairs(expert) * plan.column_tiles() : 0;
  });
  if (threadIdx.x % 32 == 0)
    hand_out_all(shared.slot, plan.tiles.num_tiles(), params.counter,
                 [&](int tile) { return plan.work(tile); });
}

template <bool kAccumulate, bool kGathers>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    grouped_wgrad_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    prefetch(&params.narrow);
    if constexpr (!kGathers) prefetch(&params.wide);
    for (int s = 0; s < kStages; ++s) {
      shared.full[s].init(kGathers ? 2 : 1);
      shared.empty[s].init(4);
      if constexpr (kGathers) shared.landed[s].init(kLanes);
    }
    shared.slot.init(kGathers ? 3 : 1);
    fence_barrier_init();
  }
  __syncthreads();
  sync_cluster();
  const uint32_t rank = cluster_rank();
  if (threadIdx.x < kWarpgroup) {
    give_registers_back<kGathers ? 72 : 40>();
    if (threadIdx.x == 0) {
      produce<kGathers>(shared, params, rank);
    } else if (threadIdx.x / 32 == 1 && rank == 0) {
      plan_work(shared, params);
    } else if constexpr (kGathers) {
      if (threadIdx.x / 32 == kGatherWarp) {
        gather(shared, params, rank);
      } else if (threadIdx.x == kForwardWarp * 32) {
        forward_gathered(shared, rank);
      }
    }
  } else {
    take_registers<kGathers ? 216 : 232>();
    consume<kAccumulate, kGathers>(shared, params, rank);
  }
  __syncwarp();  // of single threads' warps
  sync_cluster();
}

template <bool kAccumulate, bool kGathers>
void launch(const Params& params, cudaStream_t stream) {
  const auto kernel = grouped_wgrad_kernel<kAccumulate, kGathers>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
  kernel<<<2 * num_clusters(), kThreads, sizeof(Shared), stream>>>(params);
  check(cudaGetLastError());
}

template <bool kGathers>
void launch(const Params& params, cudaStream_t stream) {
  params.accumulate ? launch<true, kGathers>(params, stream)
                    : launch<false, kGathers>(params, stream);
}

}  // namespace

void launch_grouped_wgrad(const GroupedWgradParams& params, cudaStream_t stream) {
  params.source == nullptr ? launch<false>(params, stream) : launch<true>(params, stream);
}

}  // namespace tessera::cuda
