// y = a · W_eᵀ of each expert's tokens, of E4M3 values whose blocks of 128 along the reduction have
// scales: the tensor cores' sums of a stage, which is such a block, are scaled and added up in F32.
//
// Unlike in grouped_pipeline.cuh tokens lie along the rows of the tensor cores' products: a thread
// then has results of two tokens, so of a stage it needs two of their scales instead of one for
// each column, which would have to come from the shared memory that the products are read from. A
// cluster's two blocks share 128 tokens and take neighbouring features. The two warpgroups of a
// block multiply in turns; a turn is handed on when its products are given to the tensor cores.
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/pipeline/ring_cursor.cuh"
#include "ops/cuda/pipeline/turns.cuh"
#include "ops/cuda/pipeline/work_queue.cuh"
#include "ops/cuda/ptx/warpgroup_product.cuh"
#include "ops/grouped_matmul/grouped_epilogue.cuh"
#include "ops/grouped_matmul/grouped_store.cuh"
#include "ops/grouped_matmul/grouped_tiles.cuh"
#include "ops/scaled_grouped_matmul/scaled_kernels.h"

namespace tessera::cuda {
namespace {

using grouped::Value;
using grouped::Work;
using Params = ScaledRowsParams;

constexpr int kStages = 4;
constexpr int kBlock = 128;  // values along the reduction: of a stage, and of a scale
constexpr int kProductReduction = 32;
constexpr int kGroupTokens = 64;  // of a warpgroup
constexpr int kTokens = 2 * kGroupTokens;
constexpr int kSlice = kScaledBlocksBoxRows;  // features of a copy, and of a store

using Roles = WarpRoles<40, 232>;
using Cursor = RingCursor<kStages>;
using BlockTurns = Turns<3>;  // barriers behind those of stores

/// kColumns features of a block's tile; two sets of sums of 192 are all that registers hold.
template <int kColumns>
struct Stage {
  uint8_t tokens[kTokens * kBlock];
  uint8_t weight[kColumns * kBlock];
};

constexpr int kFeedWarps = 2;
constexpr int kFirstFeedWarp = 2;  // of the warpgroup that feeds the products

template <int kColumns>
struct Shared {
  Stage<kColumns> stages[kStages];
  Value results[2][kGroupTokens * kColumns];  // of each warpgroup that multiplies
  float2 factors[kStages][kTokens];  // a token's scale times those of the tile's blocks of weights
  Barrier full[kStages];
  Barrier empty[kStages];
  WorkQueue<Work, 1> queue;
  int tile_begin[kGroupedMaxExperts + 1];
};

template <int kColumns>
struct Plan {
  const Params& params;
  GroupedTiles tiles;

  __device__ int num_rows(int expert) const {
    return static_cast<int>(params.offsets[expert + 1] - params.offsets[expert]);
  }
  __device__ int num_features(int expert) const {
    return params.block_begin[expert + 1] - params.block_begin[expert];
  }
  __device__ int pairs(int expert) const {
    return (num_features(expert) + 2 * kColumns - 1) / (2 * kColumns);
  }
  __device__ Work work(int tile) const {
    const int expert = tiles.expert_of(tile);
    const int rows = num_rows(expert);
    const GroupedTile at = tiles.locate(tile, num_row_tiles(rows, kTokens), pairs(expert), expert);
    const int row = at.major * kTokens;
    return {.expert = expert,
            .row = static_cast<int>(params.offsets[expert]) + row,
            .num_rows = min(kTokens, rows - row),
            .feature = 2 * at.minor * kColumns,
            .num_features = num_features(expert),
            .weight_row = params.block_begin[expert],
            .num_stages = params.num_blocks,
            .values_end = 0};
  }
};

/// By a warp of the cluster's first block.
template <int kColumns>
__device__ void plan_work(Shared<kColumns>& shared, const Params& params) {
  const Plan<kColumns> plan{params, {shared.tile_begin, params.num_experts}};
  sum_tiles(plan.tiles, [&](int expert) {
    return num_row_tiles(plan.num_rows(expert), kTokens) * plan.pairs(expert);
  });
  if (threadIdx.x % 32 == 0)
    hand_out_all(
        shared.queue, plan.tiles.num_tiles(), params.counter,
        [&](int tile) { return plan.work(tile); },
        [&](const Work&, uint32_t turn) { shared.queue.wait_taken(turn); });
}

/// By one thread: the weight's features of this block, and its part of the tokens for both blocks.
template <int kColumns>
__device__ void produce(Shared<kColumns>& shared, const Params& params, uint32_t rank) {
  Cursor cursor;
  uint32_t turn = 0;
  for (;;) {
    const Work work = shared.queue.take(turn);
    if (work.expert < 0) return let_next_begin();
    const int weight_row = work.weight_row + work.feature + static_cast<int>(rank) * kColumns;
    const int num_boxes = (work.num_rows + kGroupedBoxRows - 1) / kGroupedBoxRows;
    for (int s = 0; s < work.num_stages; ++s) {
      auto& stage = shared.stages[cursor.stage];
      Barrier* const full = &shared.full[cursor.stage];
      shared.empty[cursor.stage].wait(cursor.parity ^ 1);
      full->arrive_and_expect((kColumns + num_boxes * kGroupedBoxRows) * kBlock);
#pragma unroll
      for (int first = 0; first < kColumns; first += kSlice)
        load_box(stage.weight + first * kBlock, &params.weight, {s * kBlock, weight_row + first},
                 full);
      for (int box = static_cast<int>(rank); box < num_boxes; box += 2)
        load_box_to_all(stage.tokens + box * kGroupedBoxRows * kBlock, &params.a,
                        {s * kBlock, work.row + box * kGroupedBoxRows}, full, 3);
      cursor.advance();
    }
  }
}

/// Where the scales of a tile's features lie: of the block of the weight that its first is in, and
/// of the next, from feature `split` of the tile on.
struct WeightScales {
  const float* first;
  const float* second;

  __device__ __forceinline__ WeightScales(const Params& params, const Work& work) {
    const int last = (work.weight_row + work.num_features - 1) / kBlock;
    const int block = min((work.weight_row + work.feature) / kBlock, last);
    first = params.weight_scales + static_cast<int64_t>(block) * params.num_blocks;
    second = params.weight_scales + static_cast<int64_t>(min(block + 1, last)) * params.num_blocks;
  }
  static __device__ __forceinline__ int split(const Work& work) {
    return kBlock - (work.weight_row + work.feature) % kBlock;
  }
};

/// By one of the warps that bring the factors of a stage's results. Tokens that are not there have
/// those of the last one.
template <int kColumns>
__device__ void feed(Shared<kColumns>& shared, const Params& params, uint32_t rank, int warp) {
  constexpr int kFeeders = kFeedWarps * 32;
  constexpr int kOwn = kTokens / kFeeders;
  const int lane = warp * 32 + static_cast<int>(threadIdx.x) % 32;
  Cursor cursor;
  uint32_t turn = 0;
  for (;;) {
    Work work = shared.queue.take_in_warp(turn);
    if (work.expert < 0) return;
    work.feature += static_cast<int>(rank) * kColumns;
    const WeightScales weights(params, work);
    const float* tokens[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
      tokens[i] = params.a_scales +
                  static_cast<int64_t>(work.row + min(lane + i * kFeeders, work.num_rows - 1)) *
                      params.num_blocks;
    float2 next[kOwn];
    const auto load = [&](int stage) {
      const float first = weights.first[stage];
      const float second = weights.second[stage];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const float token = tokens[i][stage];
        next[i] = {token * first, token * second};
      }
    };
    load(0);
    for (int s = 0; s < work.num_stages; ++s) {
      float2 own[kOwn];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) own[i] = next[i];
      if (s + 1 < work.num_stages) load(s + 1);
      shared.empty[cursor.stage].wait(cursor.parity ^ 1);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) shared.factors[cursor.stage][lane + i * kFeeders] = own[i];
      shared.full[cursor.stage].arrive();
      cursor.advance();
    }
  }
}

/// sum += d · factors, of which the second of a token counts from feature `split` on.
template <int kColumns>
__device__ __forceinline__ void add_scaled(float (&sum)[kColumns / 2],
                                           const float (&d)[kColumns / 2],
                                           const float2 (&factors)[2], int split) {
#pragma unroll
  for (int first = 0; first < kColumns; first += kSlice) {
    float own[2];
#pragma unroll
    for (int h = 0; h < 2; ++h)
      own[h] = first == 0 || (first < kBlock && first < split) ? factors[h].x : factors[h].y;
#pragma unroll
    for (int i = 0; i < kSlice / 2; ++i) {
      const int at = first / 2 + i;
      sum[at] = fmaf(d[at], own[i / 2 % 2], sum[at]);
    }
  }
}

/// By a warp: a stage was read. Both blocks' copies of it are the tokens' as well.
template <int kColumns>
__device__ __forceinline__ void release(Shared<kColumns>& shared, int stage) {
  const auto lane = threadIdx.x % 32;
  if (lane < 2) shared.empty[stage].arrive_at(lane);
}

/// Rounds a warpgroup's results into a tile for each 64 features, as TMA swizzles them.
template <int kColumns>
__device__ __forceinline__ void fill_results(Value* results, const float (&sum)[kColumns / 2]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const int token = warp * 16 + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
  for (int first = 0; first < kColumns; first += 16) {
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = first / 2 + 2 * i;
      const __nv_bfloat162 two = __floats2bfloat162_rn(sum[at], sum[at + 1]);
      packed[i] = reinterpret_cast<const uint32_t&>(two);
    }
    const int chunk = (first % kSlice / 8 + lane / 16) ^ (token % 8);
    const uint32_t to = shared_address(results + first / kSlice * (kGroupTokens * kSlice) +
                                       token * kSlice + chunk * 8);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(packed[0]), "r"(packed[1]), "r"(packed[2]), "r"(packed[3])
                 : "memory");
  }
}

template <int kColumns>
__device__ __forceinline__ void store(Value* results, const Params& params,
                                      const float (&sum)[kColumns / 2], const Work& work,
                                      int group) {
  const bool leader = threadIdx.x % kWarpgroup == 0;
  if (leader) wait_stores_read<0>();
  sync_threads(1 + group, kWarpgroup);
  fill_results<kColumns>(results, sum);
  fence_shared_for_async();
  sync_threads(1 + group, kWarpgroup);
  const int row = group * kGroupTokens;
  for (int column = 0; column < kColumns; column += kSlice) {
    for (int first = 0; first < kGroupTokens; first += kGroupedStoreRows) {
      const grouped::TilePlace to{.row = work.row + row + first,
                                  .num_rows = work.num_rows - row - first,
                                  .column = work.feature + column,
                                  .num_columns = work.num_features - work.feature - column};
      if (to.num_rows <= 0 || to.num_columns <= 0) continue;
      grouped::store_tile<kSlice>(&params.y_map, static_cast<Value*>(params.y), params.y_columns,
                                  results + column * kGroupTokens + first * kSlice, to);
    }
  }
  if (leader) commit_stores();
}

/// What describe_tile<TileMajor::kReduction> says beside a tile's address, which alone is kept and
/// told to be the same in all lanes: more would wait for uniform registers before the products.
constexpr uint64_t kTileLayout = uint64_t{1} << 62 | uint64_t{1024 >> 4} << 32 | 1 << 16;

__device__ __forceinline__ uint32_t tile_address(const void* first, uint32_t step, int stage) {
  const uint32_t address = (shared_address(first) & 0x3FFFF) >> 4;
  return __shfl_sync(~0U, address + stage * step, 0);
}

/// The products of a warpgroup's part of a tile. All that a stage asks for beside its operands is
/// found while the products of the one before are under way: a warpgroup's own time, of which the
/// sums take the most since the tensor cores read the same registers, must not be longer than the
/// products of both.
template <int kColumns>
__device__ __forceinline__ void multiply(Shared<kColumns>& shared, const Params& params,
                                         const Work& work, int group, Cursor& cursor) {
  using Product = WarpgroupProductE4m3<kColumns>;
  constexpr int kProducts = kBlock / kProductReduction;
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const int token = group * kGroupTokens + thread / 32 * 16 + thread % 32 / 4;
  const int split = WeightScales::split(work);
  const auto& first = shared.stages[0];
  constexpr uint32_t kStageStep = sizeof(first) >> 4;
  const auto find_tokens = [&](int stage) {
    return tile_address(first.tokens + group * kGroupTokens * kBlock, kStageStep, stage);
  };
  const auto find_weight = [&](int stage) { return tile_address(first.weight, kStageStep, stage); };
  float sum[kColumns / 2] = {};
  float d[kColumns / 2];
  bool is_full = false;
  uint32_t tokens = find_tokens(cursor.stage);
  uint32_t weight = find_weight(cursor.stage);
  for (int s = 0; s < work.num_stages; ++s) {
    if (!is_full) shared.full[cursor.stage].wait(cursor.parity);
    const float2 factors[2] = {shared.factors[cursor.stage][token],
                               shared.factors[cursor.stage][token + 8]};
    BlockTurns::wait(group);
    begin_products();
#pragma unroll
    for (int k = 0; k < kProducts; ++k) {
      constexpr uint32_t kNext = kNextReduction<TileMajor::kReduction>;
      Product::run(d, kTileLayout | (tokens + k * kNext), kTileLayout | (weight + k * kNext),
                   k > 0);
    }
    commit_products();
    BlockTurns::give(1 - group);
    const int stage = cursor.stage;
    cursor.advance();
    tokens = find_tokens(cursor.stage);
    weight = find_weight(cursor.stage);
    is_full = shared.full[cursor.stage].has_ended(cursor.parity);
    wait_products<0>();
    fence_values(d);
    release(shared, stage);
    add_scaled<kColumns>(sum, d, factors, split);
  }
  store<kColumns>(shared.results[group], params, sum, work, group);
}

/// What a warpgroup without tokens in a tile does instead.
template <int kColumns>
__device__ __forceinline__ void skip(Shared<kColumns>& shared, const Work& work, int group,
                                     Cursor& cursor) {
  for (int s = 0; s < work.num_stages; ++s) {
    shared.full[cursor.stage].wait(cursor.parity);
    BlockTurns::wait(group);
    BlockTurns::give(1 - group);
    release(shared, cursor.stage);
    cursor.advance();
  }
}

template <int kColumns>
__device__ __forceinline__ void consume(Shared<kColumns>& shared, const Params& params,
                                        uint32_t rank) {
  Cursor cursor;
  uint32_t turn = 0;
  const int group = static_cast<int>(threadIdx.x) / kWarpgroup - 1;
  BlockTurns::begin(group);
  for (;;) {
    Work work = shared.queue.take_in_warp(turn);
    if (work.expert < 0) break;
    work.feature += static_cast<int>(rank) * kColumns;
    const bool is_there = work.num_rows > group * kGroupTokens && work.feature < work.num_features;
    if (is_there) {
      multiply<kColumns>(shared, params, work, group, cursor);
    } else {
      skip<kColumns>(shared, work, group, cursor);
    }
  }
  wait_stores_read<0>();  // shared memory ends with the block
}

template <int kColumns>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Roles::kThreads, 1)
    scaled_blocks_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<kColumns>*>(memory);
  const uint32_t rank = cluster_rank();
  if (threadIdx.x == 0) {
    prefetch(&params.weight);
    prefetch(&params.a);
    for (int s = 0; s < kStages; ++s) {
      shared.full[s].init(1 + kFeedWarps * 32);
      shared.empty[s].init(2 * WorkQueue<Work, 1>::kWarpsThatMultiply);
    }
    shared.queue.init(1 + kFeedWarps);
    fence_barrier_init();
  }
  __syncthreads();
  sync_cluster();
  wait_for_earlier();
  if (threadIdx.x < kWarpgroup) {
    Roles::begin_feeding();
    if (threadIdx.x == 0) {
      produce<kColumns>(shared, params, rank);
    } else if (threadIdx.x / 32 == 1 && rank == 0) {
      plan_work<kColumns>(shared, params);
    } else if (threadIdx.x / 32 >= kFirstFeedWarp) {
      feed<kColumns>(shared, params, rank, static_cast<int>(threadIdx.x) / 32 - kFirstFeedWarp);
    }
  } else {
    Roles::begin_multiplying();
    consume<kColumns>(shared, params, rank);
  }
  __syncwarp();  // of single threads' warps
  sync_cluster();
}

template <int kColumns>
void launch(const Params& params, cudaStream_t stream) {
  static_assert(sizeof(Shared<kColumns>) <= kMaxShared);
  const auto kernel = scaled_blocks_kernel<kColumns>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             sizeof(Shared<kColumns>)));
  const auto blocks = static_cast<unsigned>(2 * num_clusters());
  launch_early(kernel, {blocks, Roles::kThreads, sizeof(Shared<kColumns>)}, stream, params);
}

/// Features that clusters multiply, those that are nobody's among them.
constexpr int covered(int features, int columns) {
  return (features + 2 * columns - 1) / (2 * columns) * 2 * columns;
}

}  // namespace

void launch_scaled_blocks(const ScaledRowsParams& params, cudaStream_t stream) {
  // Tiles of 128 features take up to 1.13 of the time of tiles of 192, feature by feature
  // (docs/log.md).
  constexpr double kOfNarrow = 1.13;
  const int features = params.y_columns;
  if (covered(features, 192) <= kOfNarrow * covered(features, 128)) {
    launch<192>(params, stream);
  } else {
    launch<128>(params, stream);
  }
}

}  // namespace tessera::cuda
