// The gradient of the experts' matrices on Hopper's tensor cores: the sum over an expert's tokens
// of the products of a narrow and a wide row. Both operands are read as they lie, tokens along the
// reduction. Persistent clusters of two blocks that take neighbouring rows of the gradient and
// share the wide operand; one warpgroup feeds the copy engine and two multiply.
#include <cuda_bf16.h>

#include "ops/cuda/bulk_copy.cuh"
#include "ops/cuda/check.h"
#include "ops/cuda/warpgroup_product.cuh"
#include "ops/grouped_matmul/grouped_kernels.h"
#include "ops/grouped_matmul/grouped_tiles.cuh"

namespace tessera::cuda {
namespace {

constexpr int kRows = 128;     // of the gradient, of a block: 64 of each warpgroup
constexpr int kColumns = 256;  // of the gradient
constexpr int kTokens = kGroupedReduction;
constexpr int kStages = 4;
constexpr int kGradBoxColumns = 32;
constexpr int kGradBoxes = kRows / kGroupedGradRows * kColumns / kGradBoxColumns;
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

struct Cursor {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

/// A stage's share of the gradient that will be added to goes to the L2 cache.
__device__ void prefetch_gradient(const Params& params, const Work& work, int stage) {
  const int end = kGradBoxes * (stage + 1) / work.num_stages;
  for (int i = kGradBoxes * stage / work.num_stages; i < end; ++i) {
    const int row = work.row + i % (kRows / kGroupedGradRows) * kGroupedGradRows;
    const int column = work.column + i / (kRows / kGroupedGradRows) * kGradBoxColumns;
    if (row < work.num_rows) prefetch_box(&params.grad_map, {column, work.block_begin + row});
  }
}

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
      full->arrive_and_expect(sizeof(Stage));
      for (int i = 0; i < kRows / 64; ++i)
        load_box(stage.narrow[i], &params.narrow, {work.row + i * 64, token}, full);
      for (int i = rank; i < kColumns / 64; i += 2)
        load_box_to_all(stage.wide[i], &params.wide, {work.column + i * 64, token}, full, 3);
      if (params.accumulate) prefetch_gradient(params, work, s);
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
/// zero if it is not finite. The first warpgroup clears what both read.
__device__ void clear_tail(Stage& stage, int num_tokens, int group) {
  clear_rows(stage.narrow[group], 1, num_tokens);
  if (group == 0) clear_rows(stage.wide[0], kColumns / 64, num_tokens);
  fence_shared_for_async();
  sync_threads(4, 2 * kWarpgroup);
}

__device__ __forceinline__ void write(float* to, float4 value, bool accumulate) {
  if (accumulate) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(value.x),
                 "f"(value.y), "f"(value.z), "f"(value.w)
                 : "memory");
  } else {
    *reinterpret_cast<float4*>(to) = value;
  }
}

/// From registers, so that the next tile begins at once. Neighbouring lanes exchange halves of two
/// blocks of 8 columns: each then has 4 columns of one. Each value is written, or added to, by one
/// thread of the grid, so that sums do not depend on an order.
__device__ void store(const Params& params, const Work& work, const float (&d)[kColumns / 2],
                      int group) {
  const int lane = threadIdx.x % 32;
  const bool is_odd = lane % 2 == 1;
  const int row = work.row + group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
  const int column = work.column + (is_odd ? 8 : 0) + lane % 4 / 2 * 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own_row = row + half * 8;
    float* const to =
        params.grad + int64_t{work.block_begin + own_row} * params.num_columns + column;
#pragma unroll
    for (int j = 0; j < kColumns / 8; j += 2) {
      const float2 a = {d[j * 4 + half * 2], d[j * 4 + half * 2 + 1]};
      const float2 b = {d[j * 4 + 4 + half * 2], d[j * 4 + 4 + half * 2 + 1]};
      const float2 keep = is_odd ? b : a;
      const float2 give = is_odd ? a : b;
      const float2 got = {__shfl_xor_sync(~0u, give.x, 1), __shfl_xor_sync(~0u, give.y, 1)};
      const float4 value = is_odd ? make_float4(got.x, got.y, keep.x, keep.y)
                                  : make_float4(keep.x, keep.y, got.x, got.y);
      if (own_row < work.num_rows && column + j * 8 < params.num_columns)
        write(to + j * 8, value, params.accumulate);
    }
  }
}

__device__ void multiply(Shared& shared, const Params& params, const Work& work, int group,
                         Cursor& cursor) {
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
    if (left < kTokens) clear_tail(stage, left, group);
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
  wait_products<0>();
  fence_values(d);
  if (work.num_stages > 0 && lane < 2) shared.empty[last].arrive_at(lane);
  store(params, work, d, group);
}

__device__ void consume(Shared& shared, const Params& params, uint32_t rank) {
  Cursor cursor;
  uint32_t turn = 0;
  const int group = threadIdx.x / kWarpgroup - 1;
  for (;;) {
    const Work work = own_part(shared.slot.take_in_warp(turn), rank);
    if (work.expert < 0) break;
    multiply(shared, params, work, group, cursor);
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

__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    grouped_wgrad_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    prefetch(&params.narrow);
    prefetch(&params.wide);
    prefetch(&params.grad_map);
    for (int s = 0; s < kStages; ++s) {
      shared.full[s].init(1);
      shared.empty[s].init(4);
    }
    shared.slot.init();
    fence_barrier_init();
  }
  __syncthreads();
  sync_cluster();
  const uint32_t rank = cluster_rank();
  if (threadIdx.x < kWarpgroup) {
    give_registers_back<40>();
    if (threadIdx.x == 0) {
      produce(shared, params, rank);
    } else if (threadIdx.x / 32 == 1 && rank == 0) {
      plan_work(shared, params);
    }
  } else {
    take_registers<232>();
    consume(shared, params, rank);
  }
  __syncwarp();  // of single threads' warps
  sync_cluster();
}

}  // namespace

void launch_grouped_wgrad(const GroupedWgradParams& params, cudaStream_t stream) {
  check(cudaFuncSetAttribute(grouped_wgrad_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             sizeof(Shared)));
  if (params.counter != nullptr) check(cudaMemsetAsync(params.counter, 0, sizeof(int), stream));
  grouped_wgrad_kernel<<<2 * num_clusters(), kThreads, sizeof(Shared), stream>>>(params);
  check(cudaGetLastError());
}

}  // namespace tessera::cuda
