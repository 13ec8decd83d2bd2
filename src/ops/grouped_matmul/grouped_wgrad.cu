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

struct Shared {
  Stage stages[kStages];
  Barrier full[kStages];
  Barrier empty[kStages];
  int tile_begin[kMaxExperts + 1];
};

struct Work {
  int row;  // of this block in the expert's block
  int num_rows;
  int column;
  int block_begin;
  int first_token;
  int num_tokens;
  int num_stages;
};

struct Plan {
  const Params& params;
  GroupedTiles tiles;

  __device__ int rows(int expert) const {
    return params.block_begin[expert + 1] - params.block_begin[expert];
  }
  __device__ int pairs(int expert) const { return (rows(expert) + 2 * kRows - 1) / (2 * kRows); }
  __device__ int column_tiles() const { return (params.num_columns + kColumns - 1) / kColumns; }

  __device__ Work work(int tile, uint32_t rank) const {
    const int expert = tiles.expert_of(tile);
    const GroupedTile at = tiles.locate(tile, column_tiles(), pairs(expert), expert);
    const int first = static_cast<int>(params.offsets[expert]);
    const int num_tokens = static_cast<int>(params.offsets[expert + 1]) - first;
    return {.row = (2 * at.minor + static_cast<int>(rank)) * kRows,
            .num_rows = rows(expert),
            .column = at.major * kColumns,
            .block_begin = params.block_begin[expert],
            .first_token = first,
            .num_tokens = num_tokens,
            .num_stages = (num_tokens + kTokens - 1) / kTokens};
  }
};

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

__device__ void produce(Shared& shared, const Plan& plan, uint32_t rank) {
  Cursor cursor;
  for (int tile = blockIdx.x / 2; tile < plan.tiles.num_tiles(); tile += gridDim.x / 2) {
    const Work work = plan.work(tile, rank);
    for (int s = 0; s < work.num_stages; ++s) {
      Stage& stage = shared.stages[cursor.stage];
      Barrier* const full = &shared.full[cursor.stage];
      const int token = work.first_token + s * kTokens;
      shared.empty[cursor.stage].wait(cursor.parity ^ 1);
      full->arrive_and_expect(sizeof(Stage));
      for (int i = 0; i < kRows / 64; ++i)
        load_box(stage.narrow[i], &plan.params.narrow, {work.row + i * 64, token}, full);
      for (int i = rank; i < kColumns / 64; i += 2)
        load_box_to_all(stage.wide[i], &plan.params.wide, {work.column + i * 64, token}, full, 3);
      cursor.advance();
    }
  }
}

/// Makes the rows of tokens that are not the expert's zero, in both operands: a value times zero is
/// not zero if it is not finite.
__device__ void clear_tail(Stage& stage, int num_tokens) {
  constexpr int kChunks = sizeof(Value) * 64 / sizeof(uint4);
  const int thread = threadIdx.x - kWarpgroup;
  auto* const tiles = reinterpret_cast<uint4*>(&stage);
  constexpr int kTiles = sizeof(Stage) / (kTile * sizeof(Value));
  const int per_tile = (kTokens - num_tokens) * kChunks;
  for (int i = thread; i < per_tile * kTiles; i += 2 * kWarpgroup)
    tiles[i / per_tile * (kTokens * kChunks) + num_tokens * kChunks + i % per_tile] = uint4{};
  fence_shared_for_async();
  sync_threads(3, 2 * kWarpgroup);
}

__device__ __forceinline__ void write(float* to, float2 value, bool accumulate) {
  if (accumulate) {
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(value.x), "f"(value.y)
                 : "memory");
  } else {
    *reinterpret_cast<float2*>(to) = value;
  }
}

/// From registers, so that the next tile begins at once: four threads write 32 bytes of a row. Each
/// value is written by one thread of the grid, so that sums do not depend on an order.
__device__ void store(const Params& params, const Work& work, const float (&d)[kColumns / 2],
                      int group) {
  const int lane = threadIdx.x % 32;
  const int row = work.row + group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
  const int column = work.column + lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own_row = row + half * 8;
    if (own_row >= work.num_rows) continue;
    float* const to =
        params.grad + int64_t{work.block_begin + own_row} * params.num_columns + column;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      if (column + j * 8 < params.num_columns)
        write(to + j * 8, {d[j * 4 + half * 2], d[j * 4 + half * 2 + 1]}, params.accumulate);
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
    if (left < kTokens) clear_tail(stage, left);
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
  if (work.num_stages > 0 && lane < 2) shared.empty[last].arrive_at(lane);
  store(params, work, d, group);
}

__device__ void consume(Shared& shared, const Plan& plan, uint32_t rank) {
  Cursor cursor;
  const int group = threadIdx.x / kWarpgroup - 1;
  for (int tile = blockIdx.x / 2; tile < plan.tiles.num_tiles(); tile += gridDim.x / 2)
    multiply(shared, plan.params, plan.work(tile, rank), group, cursor);
}

__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    grouped_wgrad_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Plan plan{params, {shared.tile_begin, params.num_experts}};
  if (threadIdx.x == 0) {
    prefetch(&params.narrow);
    prefetch(&params.wide);
    for (int s = 0; s < kStages; ++s) {
      shared.full[s].init(1);
      shared.empty[s].init(4);
    }
    fence_barrier_init();
  }
  if (threadIdx.x < 32)
    sum_tiles(plan.tiles, [&](int expert) {
      // An expert without tokens adds nothing, but its gradient must be written where it is not
      // added to.
      const bool has_tokens = params.offsets[expert + 1] > params.offsets[expert];
      return has_tokens || !params.accumulate ? plan.pairs(expert) * plan.column_tiles() : 0;
    });
  __syncthreads();
  sync_cluster();
  const uint32_t rank = cluster_rank();
  if (threadIdx.x < kWarpgroup) {
    give_registers_back<40>();
    if (threadIdx.x == 0) produce(shared, plan, rank);
  } else {
    take_registers<232>();
    consume(shared, plan, rank);
  }
  sync_cluster();
}

}  // namespace

void launch_grouped_wgrad(const GroupedWgradParams& params, cudaStream_t stream) {
  check(cudaFuncSetAttribute(grouped_wgrad_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             sizeof(Shared)));
  grouped_wgrad_kernel<<<2 * num_clusters(), kThreads, sizeof(Shared), stream>>>(params);
  check(cudaGetLastError());
}

}  // namespace tessera::cuda
