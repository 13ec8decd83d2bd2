#pragma once

#include <cuda_bf16.h>

#include "ops/cuda/check.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/pipeline/ring_cursor.cuh"
#include "ops/cuda/pipeline/warp_roles.cuh"
#include "ops/cuda/pipeline/work_queue.cuh"
#include "ops/cuda/ptx/block_box.cuh"
#include "ops/cuda/ptx/bulk_copy.cuh"
#include "ops/cuda/ptx/warpgroup_product.cuh"
#include "ops/grouped_matmul/grouped_epilogue.cuh"
#include "ops/grouped_matmul/grouped_gather.cuh"
#include "ops/grouped_matmul/grouped_kernels.h"
#include "ops/grouped_matmul/grouped_tile_model.h"
#include "ops/grouped_matmul/grouped_tiles.cuh"

/// The products of each expert's tokens with its matrix on Hopper's tensor cores: persistent
/// clusters of two blocks, in which one warpgroup plans and issues TMA's copies and two multiply by
/// wgmma.
///
/// Features lie along the rows of the tensor cores' products and tokens along their columns, whose
/// number can be any multiple of 8: an expert's tokens are cut into tiles of nearly one size, so
/// that few columns are nobody's. A cluster's tile has 256 features. Its two blocks take one
/// half of them each and share the tokens; where tokens are gathered, they take one half of the
/// tokens each and share the weight, and a warpgroup multiplies two tiles of 64 features. What
/// is done with the products is a template's argument, a TileEpilogue (grouped_epilogue.cuh).
namespace tessera::cuda {
namespace grouped {

constexpr int kStages = 4;
constexpr int kMaxExperts = kGroupedMaxExperts;
constexpr int kStoreTokens = kGroupedStoreRows;

/// By which the second warpgroup begins later: where both end a tile at once nothing is multiplied
/// while they pack their results. A stage and a half of the longest tile.
constexpr int kApartCycles = 1500;

using Roles = WarpRoles<40, 232>;
constexpr int kThreads = Roles::kThreads;

/// How a block's part of a cluster's tile is cut.
template <typename Epilogue>
struct Cut {
  static constexpr bool kGathers = Epilogue::kGathers;
  static constexpr int kTokens = Epilogue::kTileTokens / (kGathers ? 2 : 1);
  static constexpr int kHalves = kGathers ? 2 : 1;  // tiles of 64 features of a warpgroup
  static constexpr int kFeatures = 2 * kHalves * 64;
};

template <typename Epilogue>
struct Stage {
  using Value = typename Epilogue::Operands::Value;
  static constexpr int kReduction = Epilogue::Operands::kReduction;
  Value weight[Cut<Epilogue>::kFeatures * kReduction];
  Value tokens[Cut<Epilogue>::kTokens * kReduction];
};

/// Lies in shared memory, one for each warp that multiplies, since beside the products every
/// register counts.
struct WarpPlaces {
  int4 tile;  // whose products are under way
  int4 kept;
  int weight_row;  // of the expert whose products are under way, where results have factors
};

template <typename Epilogue>
struct Shared {
  Stage<Epilogue> stages[kStages];
  typename Epilogue::Store store;
  Barrier full[kStages];
  Barrier empty[kStages];
  WorkQueue<Work, 1> queue;
  int tile_begin[kMaxExperts + 1];
  WarpPlaces places[WorkQueue<Work, 1>::kWarpsThatMultiply];
};

/// This thread's number, read anew: what is derived from it takes no register meanwhile.
__device__ __forceinline__ int read_thread() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return static_cast<int>(thread);
}

template <typename Epilogue>
__device__ __forceinline__ WarpPlaces& own_places(Shared<Epilogue>& shared) {
  return shared.places[(read_thread() - kWarpgroup) / 32];
}

__device__ __forceinline__ Place read_place(const int4& from) {
  Place place;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(place.row), "=r"(place.num_rows), "=r"(place.feature),
                 "=r"(place.num_features)
               : "r"(shared_address(&from))
               : "memory");
  return place;
}
/// By a warp.
__device__ __forceinline__ void write_place(int4& to, const Place& place) {
  __syncwarp();
  if (read_thread() % 32 == 0) to = {place.row, place.num_rows, place.feature, place.num_features};
  __syncwarp();
}

template <typename Epilogue>
struct Plan {
  static constexpr bool kIsSparse = Epilogue::kSparse != SparsePart::kNone;
  const typename Epilogue::Params& params;
  GroupedTiles tiles;

  __device__ int pairs(int expert) const {
    return (Epilogue::features(params, expert) + 2 * kFeatures - 1) / (2 * kFeatures);
  }
  __device__ int num_rows(int expert) const {
    if constexpr (kIsSparse) {
      return params.values.num_rows(params.block_begin[expert]);
    } else {
      return static_cast<int>(params.offsets[expert + 1] - params.offsets[expert]);
    }
  }
  __device__ int first_row(int expert) const {
    if constexpr (kIsSparse) {
      return params.values.first_row(params.block_begin[expert]);
    } else {
      return static_cast<int>(params.offsets[expert]);
    }
  }
  /// The rows of each of an expert's tiles but the last.
  static __device__ int tile_height(int rows, int num_tiles) {
    if constexpr (kIsSparse) {
      const int steps = rows / kSparseColumns;
      return (steps + num_tiles - 1) / num_tiles * kSparseColumns;
    } else {
      return tile_rows(rows, num_tiles);
    }
  }
  /// Where an expert's row lies in the values; their columns are the sparse matrix's.
  __device__ int place_in_values(int expert, int row) const {
    if constexpr (kIsSparse) {
      const int begin = params.block_begin[expert];
      const int columns = params.block_begin[expert + 1] - begin;
      return params.values.first_value(begin) + row * (columns / 64);
    } else {
      return 0;
    }
  }

  __device__ Work work(int tile) const {
    const int expert = tiles.expert_of(tile);
    const int rows = num_rows(expert);
    const int num_tiles = num_row_tiles(rows, Epilogue::kTileTokens);
    const GroupedTile at = tiles.locate(tile, num_tiles, pairs(expert), expert);
    const int height = tile_height(rows, num_tiles);
    const int row = at.major * height;
    return {
        .expert = expert,
        .row = first_row(expert) + row,
        .num_rows = min(height, rows - row),
        .feature = 2 * at.minor * kFeatures,
        .num_features = Epilogue::features(params, expert),
        .weight_row = params.block_begin[expert],
        .num_stages = (Epilogue::reduction(params, expert) + Epilogue::Operands::kReduction - 1) /
                      Epilogue::Operands::kReduction,
        .values_end = place_in_values(expert, row + min(height, rows - row))};
  }
};

using Cursor = RingCursor<kStages>;

/// What the block of this rank does of the cluster's work: one half of the features, or of the
/// tokens, which may be none.
template <typename Epilogue>
__device__ __forceinline__ Work own_part(Work work, uint32_t rank) {
  if constexpr (Epilogue::kGathers) {
    const int first_half = first_half_rows(work.num_rows);
    work.row += rank == 0 ? 0 : first_half;
    work.num_rows = rank == 0 ? min(first_half, work.num_rows) : max(work.num_rows - first_half, 0);
  } else {
    work.feature += static_cast<int>(rank) * kFeatures;
  }
  return work;
}

constexpr int kRowBytes = 128;  // of a stage

template <typename Epilogue>
__device__ void produce(Shared<Epilogue>& shared, const typename Epilogue::Params& params,
                        uint32_t rank) {
  constexpr int kBoxTokens = Epilogue::kBoxTokens;
  using Value = typename Epilogue::Operands::Value;
  constexpr int kReduction = Epilogue::Operands::kReduction;
  static_assert(kReduction * sizeof(Value) == kRowBytes);
  Cursor cursor;
  uint32_t turn = 0;
  for (;;) {
    const Work work = own_part<Epilogue>(shared.queue.take(turn), rank);
    if (work.expert < 0) return let_next_begin();
    const int num_boxes = (work.num_rows + kBoxTokens - 1) / kBoxTokens;
    const int engine_rows = Epilogue::kGathers ? 0 : num_boxes * kBoxTokens;
    const uint32_t bytes = (Cut<Epilogue>::kFeatures + engine_rows) * kRowBytes;
    for (int s = 0; s < work.num_stages; ++s) {
      auto& stage = shared.stages[cursor.stage];
      Barrier* const full = &shared.full[cursor.stage];
      shared.empty[cursor.stage].wait(cursor.parity ^ 1);
      full->arrive_and_expect(bytes);
      if constexpr (Epilogue::kGathers) {
        Epilogue::load_shared_weight(stage.weight, params, work, s * kReduction, full, rank);
      } else {
        Epilogue::load_weight(stage.weight, params, work, s * kReduction, full);
        for (int box = rank; box < num_boxes; box += 2) {
          Value* const tokens = stage.tokens + box * kBoxTokens * kReduction;
          if constexpr (Epilogue::kSparse == SparsePart::kTokens) {
            load_block_box_to_all(tokens, params.values.map_of(work.num_stages * kReduction),
                                  block_box(work.values_end + s, work.num_rows, box * kBoxTokens),
                                  full, 3);
          } else {
            load_box_to_all(tokens, &params.a, {s * kReduction, work.row + box * kBoxTokens}, full,
                            3);
          }
        }
      }
      cursor.advance();
    }
  }
}

/// By one of the warps that gather: copies its part of this block's rows of tokens of all stages.
template <typename Epilogue>
__device__ void gather(Shared<Epilogue>& shared, const typename Epilogue::Params& params,
                       uint32_t rank, int warp) {
  constexpr int kOwn = Cut<Epilogue>::kTokens / kGatherWarps;
  Cursor cursor;
  uint32_t turn = 0;
  for (;;) {
    const Work work = own_part<Epilogue>(shared.queue.take_in_warp(turn), rank);
    if (work.expert < 0) return;
    const auto places = places_of(load_sources<kOwn>(params, work.row, work.num_rows, warp),
                                  params.top_k, params.wide);
    for (int s = 0; s < work.num_stages; ++s) {
      const int column = s * kReduction;
      shared.empty[cursor.stage].wait(cursor.parity ^ 1);
      copy_rows<1, Cut<Epilogue>::kTokens>(shared.stages[cursor.stage].tokens,
                                           static_cast<const Value*>(params.tokens) + column,
                                           params.wide - column, places, work.num_rows, warp);
      arrive_when_copied(&shared.full[cursor.stage]);
      cursor.advance();
    }
  }
}

template <typename Epilogue>
__device__ __forceinline__ void store_step(Shared<Epilogue>& shared,
                                           const typename Epilogue::Params& params,
                                           typename Epilogue::Kept& kept, int step, int group) {
  Epilogue::store_step(shared.store, params, kept, read_place(own_places(shared).kept), step,
                       group);
}

/// Stores all that is kept, from step `first` on.
template <typename Epilogue>
__device__ __forceinline__ void store_all(Shared<Epilogue>& shared,
                                          const typename Epilogue::Params& params,
                                          typename Epilogue::Kept& kept, int first, int group) {
  for (int step = first; step < Epilogue::kSteps; ++step)
    store_step<Epilogue>(shared, params, kept, step, group);
}

constexpr int kReleases = 2 * 2;  // of a stage: by both warpgroups of both blocks

/// By a warpgroup, whose products end together: they have read a stage.
template <typename Epilogue>
__device__ __forceinline__ void release(Shared<Epilogue>& shared, int stage) {
  const int lane = read_thread() % kWarpgroup;
  if (lane < 2) shared.empty[stage].arrive_at(lane);
}

/// The products of one tile. What is kept of the one before is stored while they run: a step beside
/// each of the first stages, whose products are under way.
/// What surrounds the products must be one function: the compiler lets them wait for each other
/// where they cross a call (its warning C7510).
template <int kColumns, typename Epilogue>
__device__ __forceinline__ void multiply(Shared<Epilogue>& shared,
                                         const typename Epilogue::Params& params, int num_stages,
                                         int group, Cursor& cursor, typename Epilogue::Kept& kept) {
  constexpr TileMajor kWeight = Epilogue::kWeightMajor;
  constexpr int kReduction = Epilogue::Operands::kReduction;
  using Product = typename Epilogue::Operands::template Product<kColumns, kWeight>;
  constexpr int kHalves = Cut<Epilogue>::kHalves;
  float d[kHalves][kColumns / 2];
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
#pragma unroll
    for (float& value : d[half]) value = 0;
  }
  int last = 0;
  for (int s = 0; s < num_stages; ++s) {
    const auto& stage = shared.stages[cursor.stage];
    uint64_t weight[kHalves];
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
      weight[half] =
          describe_tile<kWeight>(stage.weight + (group * kHalves + half) * 64 * kReduction, 0);
    uint64_t tokens = describe_tile<TileMajor::kReduction>(stage.tokens, 0);
    shared.full[cursor.stage].wait(cursor.parity);
    if constexpr (Epilogue::kGathers) fence_shared_for_async();
    begin_products();
#pragma unroll
    for (int k = 0; k < kReduction / Epilogue::Operands::kProductReduction; ++k) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        Product::run(d[half], weight[half], tokens, true);
        weight[half] += kNextReduction<kWeight>;
      }
      tokens += kNextReduction<TileMajor::kReduction>;
    }
    commit_products();
    const bool has_step = s < Epilogue::kSteps;
    if (Epilogue::kLongSteps && has_step) store_step<Epilogue>(shared, params, kept, s, group);
    wait_products<1>();
    if (s > 0) release(shared, last);
    last = cursor.stage;
    cursor.advance();
    if (!Epilogue::kLongSteps && has_step) store_step<Epilogue>(shared, params, kept, s, group);
  }
  store_all<Epilogue>(shared, params, kept, num_stages, group);
  if constexpr (kHasFactors<Epilogue>) {
    const auto factors = Epilogue::load_factors(params, read_place(own_places(shared).tile),
                                                own_places(shared).weight_row, group);
    wait_products<0>();
    fence_values(d[0]);
    Epilogue::template scale<kColumns>(d[0], factors);
  } else {
    wait_products<0>();
#pragma unroll
    for (int half = 0; half < kHalves; ++half) fence_values(d[half]);
  }
  if (num_stages > 0) release(shared, last);
#pragma unroll
  for (int half = 0; half < kHalves; ++half) Epilogue::template keep<kColumns>(kept, d[half], half);
  WarpPlaces& places = own_places(shared);
  const Place place = Epilogue::place(read_place(places.tile), group);
  write_place(places.kept, place);
  Epilogue::begin_store(shared.store, params, kept, place, group);
}

/// multiply<product_columns(num_rows)>, or as gathered_columns has it: accumulators need a size
/// known when compiled.
template <typename Epilogue, int kColumns = Cut<Epilogue>::kTokens>
__device__ __forceinline__ void multiply_columns(Shared<Epilogue>& shared,
                                                 const typename Epilogue::Params& params,
                                                 int num_rows, int num_stages, int group,
                                                 Cursor& cursor, typename Epilogue::Kept& kept) {
  constexpr int kCoarse = Epilogue::kGathers ? kCoarseHalfColumns : kCoarseColumns;
  constexpr bool kIsSparse = Epilogue::kSparse != SparsePart::kNone;
  constexpr int kFine = kIsSparse ? kSparseColumns : 8;
  constexpr int kFewer = kColumns - (kColumns > kCoarse ? kFine : kIsSparse ? 64 : 32);
  if constexpr (kFewer > 0) {
    if (num_rows <= kFewer)
      return multiply_columns<Epilogue, kFewer>(shared, params, num_rows, num_stages, group, cursor,
                                                kept);
  }
  multiply<kColumns, Epilogue>(shared, params, num_stages, group, cursor, kept);
}

template <typename Epilogue>
__device__ __forceinline__ void consume(Shared<Epilogue>& shared,
                                        const typename Epilogue::Params& params, uint32_t rank) {
  Cursor cursor;
  uint32_t turn = 0;
  const int group = threadIdx.x / kWarpgroup - 1;
  typename Epilogue::Kept kept{};
  write_place(own_places(shared).kept, {});
  if (group == 1) spend_cycles(kApartCycles);
  for (;;) {
    const Work work = own_part<Epilogue>(shared.queue.take_in_warp(turn), rank);
    if (work.expert < 0) break;
    const int row = Epilogue::kSparse == SparsePart::kResult ? work.values_end : work.row;
    if constexpr (kHasFactors<Epilogue>) own_places(shared).weight_row = work.weight_row;
    write_place(own_places(shared).tile, {row, work.num_rows, work.feature, work.num_features});
    multiply_columns<Epilogue>(shared, params, work.num_rows, work.num_stages, group, cursor, kept);
  }
  store_all<Epilogue>(shared, params, kept, 0, group);
  wait_stores_read<0>();  // shared memory ends with the block
}

/// By a warp of the cluster's first block.
template <typename Epilogue>
__device__ void plan_work(Shared<Epilogue>& shared, const typename Epilogue::Params& params) {
  const Plan<Epilogue> plan{params, {shared.tile_begin, params.num_experts}};
  sum_tiles(plan.tiles, [&](int expert) {
    return num_row_tiles(plan.num_rows(expert), Epilogue::kTileTokens) * plan.pairs(expert);
  });
  if (threadIdx.x % 32 == 0)
    hand_out_all(
        shared.queue, plan.tiles.num_tiles(), params.counter,
        [&](int tile) { return plan.work(tile); },
        [&](const Work&, uint32_t turn) { shared.queue.wait_taken(turn); });
}

template <typename Epilogue>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    grouped_kernel(const __grid_constant__ typename Epilogue::Params params) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<Epilogue>*>(memory);
  constexpr bool kGathers = Epilogue::kGathers;
  constexpr int kOtherWarps = kGathers ? kGatherWarps : 0;
  const uint32_t rank = cluster_rank();
  if (threadIdx.x == 0) {
    prefetch(&params.weight);
    if constexpr (!kGathers) prefetch(&params.a);
    for (int s = 0; s < kStages; ++s) {
      shared.full[s].init(1 + kLanes * kOtherWarps);
      shared.empty[s].init(kReleases);
    }
    shared.queue.init(1 + kOtherWarps);
    Epilogue::init(shared.store);
    fence_barrier_init();
  }
  __syncthreads();
  sync_cluster();
  wait_for_earlier();
  if (threadIdx.x < kWarpgroup) {
    Roles::begin_feeding();
    if (threadIdx.x == 0) {
      produce<Epilogue>(shared, params, rank);
    } else if (threadIdx.x / 32 == 1 && rank == 0) {
      plan_work<Epilogue>(shared, params);
    } else if constexpr (kGathers) {
      const int warp = read_thread() / 32 - kFirstGatherWarp;
      if (warp >= 0) gather<Epilogue>(shared, params, rank, warp);
    }
  } else {
    Roles::begin_multiplying();
    consume<Epilogue>(shared, params, rank);
  }
  __syncwarp();  // of single threads' warps
  sync_cluster();
}

template <TileEpilogue Epilogue>
void launch(const typename Epilogue::Params& params, cudaStream_t stream) {
  static_assert(sizeof(Shared<Epilogue>) <= kMaxShared);
  const auto kernel = grouped_kernel<Epilogue>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             sizeof(Shared<Epilogue>)));
  const auto blocks = static_cast<unsigned>(2 * num_clusters());
  launch_early(kernel, {blocks, kThreads, sizeof(Shared<Epilogue>)}, stream, params);
}

}  // namespace grouped
}  // namespace tessera::cuda
