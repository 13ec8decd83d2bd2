#pragma once

#include <cuda_bf16.h>

#include <concepts>

#include "ops/cuda/ptx/bulk_copy.cuh"
#include "ops/cuda/ptx/warpgroup_product.cuh"
#include "ops/grouped_matmul/grouped_kernels.h"
#include "ops/grouped_matmul/grouped_tile_model.h"

/// What the pipeline of the experts' products (grouped_pipeline.cuh) and what is done with its
/// results have in common.
namespace tessera::cuda {
namespace grouped {

constexpr int kFeatures = kGroupedFeatures;  // of a block: 64 of each warpgroup
constexpr int kMaxTokens = kGroupedMaxRows;  // of a tile
constexpr int kReduction = kGroupedReduction;

using Value = __nv_bfloat16;

/// What is multiplied: stages have 128 bytes of the reduction in each row.
struct Bf16Operands {
  using Value = __nv_bfloat16;
  static constexpr int kReduction = grouped::kReduction;
  static constexpr int kProductReduction = 16;
  template <int kColumns, TileMajor kWeight>
  using Product = WarpgroupProduct<kColumns, kWeight, TileMajor::kReduction>;
};

/// What of an expert's product lies in the values of a block-sparse matrix, whose experts have
/// multiples of 64 rows and columns.
enum class SparsePart { kNone, kTokens, kResult };

/// Of which a sparse product's numbers of columns are multiples where they are many: fewer kernels
/// to compile than multiples of 8 would need, and no column is nobody's.
constexpr int kSparseColumns = 16;

/// What a cluster multiplies in one step.
struct Work {
  int expert;
  int row;
  int num_rows;
  int feature;
  int num_features;  // of the expert
  int weight_row;    // of the expert's block
  int num_stages;
  int values_end;  // of a sparse matrix, where the tile's rows end in its values, in 64s; else 0
};

/// Tokens and features of a tile: of the block's, or of what one warpgroup keeps of it.
struct Place {
  int row;       // of sparse results where the tile's rows end in the values, in 64s
  int num_rows;  // zero where there is nothing to store
  int feature;
  int num_features;  // of the expert
};

/// What the pipeline asks of an Epilogue:
///   Params          its kernel's parameters: those of GroupedRowsParams that are used here
///   Operands        the types of what is multiplied, such as Bf16Operands
///   kWeightMajor    how the weight's tile lies in shared memory
///   kTileTokens     the most tokens of a tile, up to kMaxTokens
///   kBoxTokens      those that one copy brings, a divisor of kTileTokens
///   kGathers        whether tokens are gathered; then Params is GroupedRowsParams, and
///                   load_shared_weight(tile, params, work, k, full, rank) loads what this block
///                   brings of the weight to both
///   kSparse         whether tokens or results are values of a block-sparse matrix, Params' member
///                   `values` (ops/block_sparse/expert_kernels.h)
///   Store           its own shared memory
///   features(params, expert), reduction(params, expert)    sizes of the expert's matrix
///   load_weight(tile, params, work, k, full)
///   init(store)     by one thread, before all else
///   Kept            the results of one tile, as a thread keeps them; stored in kSteps steps beside
///                   the next tile's products
///   place(tile, group)    where those of a warpgroup belong
///   kLongSteps      whether a step may take longer than a stage: it begins while the products of
///                   two stages are under way, and a stage's memory is free for the next only later
///   keep<kColumns>(kept, d, half)    for each tile of 64 features
///   load_factors(params, place, weight_row, group), scale<kColumns>(d, factors)
///                   where results have factors of their own: these are loaded while the last
///                   products are under way
///   begin_store(store, params, kept, place, group)    before the first step
///   store_step(store, params, kept, place, step, group)
template <typename E>
concept TileEpilogue = requires(typename E::Store& store, const typename E::Params& params,
                                typename E::Kept& kept, const float (&d)[32], const Place& place,
                                const Work& work, typename E::Operands::Value* tile,
                                Barrier* full) {
  requires E::kTileTokens <= kMaxTokens;
  requires E::kTileTokens % E::kBoxTokens == 0;
  requires(E::kSteps > 0);
  { E::kWeightMajor } -> std::convertible_to<TileMajor>;
  { E::kSparse } -> std::convertible_to<SparsePart>;
  { E::kGathers } -> std::convertible_to<bool>;
  { E::kLongSteps } -> std::convertible_to<bool>;
  { E::features(params, 0) } -> std::same_as<int>;
  { E::reduction(params, 0) } -> std::same_as<int>;
  { E::place(place, 0) } -> std::same_as<Place>;
  E::init(store);
  E::load_weight(tile, params, work, 0, full);
  E::template keep<64>(kept, d, 0);
  E::begin_store(store, params, kept, place, 0);
  E::store_step(store, params, kept, place, 0, 0);
};

template <typename E>
constexpr bool kHasFactors = requires(const typename E::Params& params, const Place& place) {
  E::load_factors(params, place, 0, 0);
};

}  // namespace grouped
}  // namespace tessera::cuda
