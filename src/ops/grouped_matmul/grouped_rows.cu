// The products of each expert's tokens with its matrix on Hopper's tensor cores: persistent
// clusters of two blocks, one warpgroup that feeds the copy engine and two that multiply.
//
// Features lie along the rows of the tensor cores' products and tokens along their columns, whose
// number can be any multiple of 32: an expert's tokens are cut into tiles of nearly one size, so
// that little is multiplied in vain. The two blocks of a cluster take neighbouring features and
// share the tokens.
#include <cuda_bf16.h>

#include "ops/cuda/bulk_copy.cuh"
#include "ops/cuda/check.h"
#include "ops/cuda/warpgroup_product.cuh"
#include "ops/grouped_matmul/grouped_kernels.h"
#include "ops/grouped_matmul/grouped_tiles.cuh"

namespace tessera::cuda {
namespace {

constexpr int kFeatures = kGroupedFeatures;  // of a block: 64 of each warpgroup
constexpr int kMaxTokens = 256;              // of a tile
constexpr int kReduction = kGroupedReduction;
constexpr int kBoxTokens = kGroupedBoxRows;
constexpr int kStages = 4;
constexpr int kMaxExperts = kGroupedMaxExperts;
constexpr int kWarpgroup = 128;
constexpr int kThreads = 3 * kWarpgroup;
constexpr int kStoreTokens = kGroupedStoreRows;
constexpr int kStoreBuffers = 2;

using Value = __nv_bfloat16;

struct Stage {
  Value weight[kFeatures * kReduction];
  Value tokens[kMaxTokens * kReduction];
};

struct Shared {
  Stage stages[kStages];
  Value store[2][kStoreBuffers][kStoreTokens * 64];  // of each warpgroup that multiplies
  Barrier full[kStages];
  Barrier empty[kStages];
  int tile_begin[kMaxExperts + 1];
  int row_begin[kMaxExperts + 1];
};

using Params = GroupedRowsParams;

/// What a cluster multiplies in one step; the block's own features begin at `feature`.
struct Work {
  int row;
  int num_rows;
  int feature;
  int num_features;  // of the expert
  int weight_row;    // of the expert's block
  int num_stages;
};

template <bool kByOut>
struct Plan {
  const Params& params;
  const Shared& shared;
  GroupedTiles tiles;

  __device__ int features(int expert) const {
    return kByOut ? params.block_begin[expert + 1] - params.block_begin[expert] : params.wide;
  }
  __device__ int reduction(int expert) const {
    return kByOut ? params.wide : params.block_begin[expert + 1] - params.block_begin[expert];
  }
  __device__ int pairs(int expert) const {
    return (features(expert) + 2 * kFeatures - 1) / (2 * kFeatures);
  }
  static __device__ int token_tiles(int num_rows) {
    return (num_rows + kMaxTokens - 1) / kMaxTokens;
  }
  static __device__ int rows_of_tile(int num_rows, int num_tiles) {
    return ((num_rows + num_tiles - 1) / num_tiles + 31) / 32 * 32;
  }

  __device__ Work work(int tile, uint32_t rank) const {
    const int expert = tiles.expert_of(tile);
    const int first = shared.row_begin[expert];
    const int num_rows = shared.row_begin[expert + 1] - first;
    const int num_tiles = token_tiles(num_rows);
    const GroupedTile at = tiles.locate(tile, num_tiles, pairs(expert), expert);
    const int height = rows_of_tile(num_rows, num_tiles);
    const int row = at.major * height;
    return {.row = first + row,
            .num_rows = min(height, num_rows - row),
            .feature = (2 * at.minor + static_cast<int>(rank)) * kFeatures,
            .num_features = features(expert),
            .weight_row = params.block_begin[expert],
            .num_stages = (reduction(expert) + kReduction - 1) / kReduction};
  }
};

/// A place in the ring of stages, and the parity of its turn.
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

template <bool kByOut>
__device__ void load_weight(Stage& stage, const Params& params, const Work& work, int k,
                            Barrier* full) {
  if constexpr (kByOut) {
    load_box(stage.weight, &params.weight, {k, work.weight_row + work.feature}, full);
  } else {
    for (int half = 0; half < 2; ++half)
      load_box(stage.weight + half * 64 * kReduction, &params.weight,
               {work.feature + half * 64, work.weight_row + k}, full);
  }
}

template <bool kByOut>
__device__ void produce(Shared& shared, const Plan<kByOut>& plan, uint32_t rank) {
  Cursor cursor;
  for (int tile = blockIdx.x / 2; tile < plan.tiles.num_tiles(); tile += gridDim.x / 2) {
    const Work work = plan.work(tile, rank);
    const int num_boxes = (work.num_rows + kBoxTokens - 1) / kBoxTokens;
    const uint32_t bytes =
        sizeof(Stage::weight) + num_boxes * kBoxTokens * kReduction * sizeof(Value);
    for (int s = 0; s < work.num_stages; ++s) {
      Stage& stage = shared.stages[cursor.stage];
      Barrier* const full = &shared.full[cursor.stage];
      shared.empty[cursor.stage].wait(cursor.parity ^ 1);
      full->arrive_and_expect(bytes);
      load_weight<kByOut>(stage, plan.params, work, s * kReduction, full);
      for (int box = rank; box < num_boxes; box += 2)
        load_box_to_all(stage.tokens + box * kBoxTokens * kReduction, &plan.params.a,
                        {s * kReduction, work.row + box * kBoxTokens}, full, 3);
      cursor.advance();
    }
  }
}

/// The BF16 tile of 32 tokens by 64 features that a warpgroup is about to store: writes this
/// thread's part of accumulators d, which belong to tokens from `first` on.
template <int kColumns>
__device__ void fill_store(Value* tile, const float (&d)[kColumns / 2], int first) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int pair = 0; pair < kStoreTokens / 16; ++pair) {
    const float* v = d + first / 2 + pair * 8;
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __nv_bfloat162 two = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
      packed[i] = reinterpret_cast<const uint32_t&>(two);
    }
    const int token = pair * 16 + lane / 16 * 8 + lane % 8;
    const int chunk = (warp * 2 + lane / 8 % 2) ^ (token % 8);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     shared_address(tile + token * 64 + chunk * 8)),
                 "r"(packed[0]), "r"(packed[1]), "r"(packed[2]), "r"(packed[3])
                 : "memory");
  }
}

/// Stores the rows and columns that the copy engine would not stop at.
__device__ void store_part(const Value* tile, Value* y, int64_t stride, int num_rows,
                           int num_columns) {
  const int lane = threadIdx.x % kWarpgroup;
  const int column = lane % 8 * 8;
  for (int row = lane / 8; row < num_rows; row += kWarpgroup / 8) {
    const Value* from = tile + row * 64 + ((lane % 8) ^ (row % 8)) * 8;
    if (column + 8 <= num_columns) {
      *reinterpret_cast<uint4*>(y + row * stride + column) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int i = 0; column + i < num_columns; ++i) y[row * stride + column + i] = from[i];
    }
  }
}

template <int kColumns>
__device__ void store(Shared& shared, const Params& params, const Work& work,
                      const float (&d)[kColumns / 2], int group) {
  const int feature = work.feature + group * 64;
  const int num_columns = min(64, work.num_features - feature);
  if (num_columns <= 0) return;
  const bool leader = threadIdx.x % kWarpgroup == 0;
#pragma unroll
  for (int first = 0; first < kColumns; first += kStoreTokens) {
    const int num_rows = min(kStoreTokens, work.num_rows - first);
    Value* const tile = shared.store[group][first / kStoreTokens % kStoreBuffers];
    if (leader) wait_stores_read<kStoreBuffers - 1>();
    sync_threads(1 + group, kWarpgroup);
    fill_store<kColumns>(tile, d, first);
    fence_shared_for_async();
    sync_threads(1 + group, kWarpgroup);
    if (num_rows == kStoreTokens && num_columns == 64) {
      if (leader) {
        store_box(&params.y_map, tile, {feature, work.row + first});
      }
    } else {
      store_part(
          tile,
          static_cast<Value*>(params.y) + int64_t{work.row + first} * params.y_columns + feature,
          params.y_columns, num_rows, num_columns);
    }
    if (leader) commit_stores();
  }
}

template <int kColumns, bool kByOut>
__device__ void multiply(Shared& shared, const Params& params, const Work& work, int group,
                         Cursor& cursor) {
  constexpr TileMajor kWeight = kByOut ? TileMajor::kReduction : TileMajor::kOther;
  using Product = WarpgroupProduct<kColumns, kWeight, TileMajor::kReduction>;
  float d[kColumns / 2];
#pragma unroll
  for (float& value : d) value = 0;
  const int lane = threadIdx.x % kWarpgroup;
  int last = 0;
  for (int s = 0; s < work.num_stages; ++s) {
    const Stage& stage = shared.stages[cursor.stage];
    uint64_t weight = describe_tile<kWeight>(stage.weight + group * 64 * kReduction, 0);
    uint64_t tokens = describe_tile<TileMajor::kReduction>(stage.tokens, 0);
    shared.full[cursor.stage].wait(cursor.parity);
    begin_products();
#pragma unroll
    for (int k = 0; k < kReduction / 16; ++k) {
      Product::run(d, weight, tokens, true);
      weight += kNextReduction<kWeight>;
      tokens += kNextReduction<TileMajor::kReduction>;
    }
    commit_products();
    wait_products<1>();
    if (s > 0 && lane < 2) shared.empty[last].arrive_at(lane);
    last = cursor.stage;
    cursor.advance();
  }
  wait_products<0>();
  if (work.num_stages > 0 && lane < 2) shared.empty[last].arrive_at(lane);
  store<kColumns>(shared, params, work, d, group);
}

template <bool kByOut>
__device__ void consume(Shared& shared, const Plan<kByOut>& plan, uint32_t rank) {
  Cursor cursor;
  const int group = threadIdx.x / kWarpgroup - 1;
  for (int tile = blockIdx.x / 2; tile < plan.tiles.num_tiles(); tile += gridDim.x / 2) {
    const Work work = plan.work(tile, rank);
    const Params& params = plan.params;
    switch ((work.num_rows + 31) / 32) {
      case 1:
        multiply<32, kByOut>(shared, params, work, group, cursor);
        break;
      case 2:
        multiply<64, kByOut>(shared, params, work, group, cursor);
        break;
      case 3:
        multiply<96, kByOut>(shared, params, work, group, cursor);
        break;
      case 4:
        multiply<128, kByOut>(shared, params, work, group, cursor);
        break;
      case 5:
        multiply<160, kByOut>(shared, params, work, group, cursor);
        break;
      case 6:
        multiply<192, kByOut>(shared, params, work, group, cursor);
        break;
      case 7:
        multiply<224, kByOut>(shared, params, work, group, cursor);
        break;
      default:
        multiply<256, kByOut>(shared, params, work, group, cursor);
        break;
    }
  }
  wait_stores_read<0>();  // shared memory ends with the block
}

template <bool kByOut>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    grouped_rows_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  Plan<kByOut> plan{params, shared, {shared.tile_begin, params.num_experts}};
  const uint32_t rank = cluster_rank();
  for (int i = threadIdx.x; i <= params.num_experts; i += kThreads)
    shared.row_begin[i] = static_cast<int>(params.offsets[i]);
  if (threadIdx.x == 0) {
    prefetch(&params.weight);
    prefetch(&params.a);
    prefetch(&params.y_map);
    for (int s = 0; s < kStages; ++s) {
      shared.full[s].init(1);
      shared.empty[s].init(4);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < 32)
    sum_tiles(plan.tiles, [&](int expert) {
      return plan.token_tiles(shared.row_begin[expert + 1] - shared.row_begin[expert]) *
             plan.pairs(expert);
    });
  __syncthreads();
  sync_cluster();
  if (threadIdx.x < kWarpgroup) {
    give_registers_back<40>();
    if (threadIdx.x == 0) produce<kByOut>(shared, plan, rank);
  } else {
    take_registers<232>();
    consume<kByOut>(shared, plan, rank);
  }
  sync_cluster();
}

}  // namespace

void launch_grouped_rows(const GroupedRowsParams& params, bool by_out, cudaStream_t stream) {
  const auto kernel = by_out ? grouped_rows_kernel<true> : grouped_rows_kernel<false>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
  kernel<<<2 * num_clusters(), kThreads, sizeof(Shared), stream>>>(params);
  check(cudaGetLastError());
}

}  // namespace tessera::cuda
