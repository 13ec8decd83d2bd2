#pragma once

#include <cuda_bf16.h>

#include <type_traits>

#include "ops/cuda/pipeline/ring_cursor.cuh"
#include "ops/cuda/pipeline/warp_roles.cuh"
#include "ops/cuda/pipeline/work_queue.cuh"
#include "ops/cuda/ptx/bulk_copy.cuh"
#include "ops/cuda/ptx/warpgroup_product.cuh"
#include "ops/grouped_matmul/expert_values.h"
#include "ops/grouped_matmul/grouped_tiles.cuh"
#include "ops/grouped_matmul/grouped_wgrad_model.h"

/// How the gradient of the experts' matrices is cut into tiles, and how warpgroups share them
/// (grouped_wgrad.cuh).
namespace tessera::cuda {
namespace wgrad {

constexpr int kRows = kWgradRows;  // of the gradient, of a cluster
constexpr int kTokens = kGroupedReduction;
constexpr int kShortStages = 12;  // of a tile that leaves no time to find the next one
constexpr size_t kStageBytes = 220 * 1024;
constexpr int kMaxExperts = kGroupedMaxExperts;
constexpr int kTile = 64 * kTokens;  // values of one copy

using Roles = WarpRoles<40, 232>;
constexpr int kThreads = Roles::kThreads;
using Value = __nv_bfloat16;

/// What is multiplied: stages have so many tokens, of which an instruction multiplies kStep. Rows
/// of BF16 lie as they are, features along them.
struct RowOperands {
  static constexpr TileMajor kMajor = TileMajor::kOther;
  static constexpr int kTokens = wgrad::kTokens;
  static constexpr int kStep = 16;
  /// Whether tokens behind an expert's last are zeros, as far as they are multiplied.
  static constexpr bool kFilledUp = false;
  template <int kColumns>
  using Product = WarpgroupProduct<kColumns, kMajor, kMajor>;

  /// Where 64 features of a stage's tokens lie.
  static __device__ __forceinline__ Box box(int feature, int token) { return {feature, token}; }
  static __device__ __forceinline__ int first_token(int64_t offset, int /*expert*/) {
    return static_cast<int>(offset);
  }
};

/// Which operand lies in the values of a block-sparse matrix, whose experts have multiples of 64
/// rows and columns: the one along the gradient's rows, or that along its columns.
enum class SparseOperand { kNone, kRows, kColumns };

/// What a cluster multiplies in one step.
struct DenseWork {
  int expert;
  int row;  // in the expert's block
  int num_rows;
  int column;
  int block_begin;
  int first_token;
  int num_tokens;
  int num_stages;
};
/// The same where an operand is sparse.
struct SparseWork {
  int expert;
  int row;
  int size;  // of the sparse operand, along the gradient's rows or columns
  int column;
  int block_begin;
  int first_token;
  int values;  // where the expert's matrix begins in the values, in 64s
  int num_stages;
};

/// How the warpgroups of a kernel work; a template's argument. A cluster's tile has kTileColumns of
/// the gradient.
template <int kTileColumns, bool kTakesPingPong, bool kAdds, bool kGathersRows,
          SparseOperand kSparseOperand = SparseOperand::kNone>
struct Schedule {
  static constexpr bool kPingPong = kTakesPingPong;
  static constexpr bool kAccumulate = kAdds;
  static constexpr bool kGathers = kGathersRows;
  static constexpr SparseOperand kSparse = kSparseOperand;
  static constexpr bool kIsSparse = kSparse != SparseOperand::kNone;
  using Work = std::conditional_t<kIsSparse, SparseWork, DenseWork>;
  using Params = std::conditional_t<kIsSparse, ExpertWgradParams, GroupedWgradParams>;
  // Of the gradient: a cluster's columns, a block's part, and tiles of 64 rows of a warpgroup.
  static constexpr int kClusterColumns = kTileColumns;
  using Operands = RowOperands;
  static constexpr int kColumns = kGathers ? kClusterColumns / 2 : kClusterColumns;
  static constexpr int kBlockRows = kGathers ? kRows : kRows / 2;
  static constexpr int kHalves = kBlockRows / 64 / (kPingPong ? 1 : 2);
  static constexpr int kGroupsAhead = kPingPong ? 2 : 4;  // see lines::Before
  static_assert(!kPingPong || !kGathers, "slower, and not tested");
  /// Arrivals by which a stage is free, those of both blocks.
  static constexpr int kReleases = kPingPong ? 2 : 4;

  struct Stage {
    Value narrow[kBlockRows / 64][kTile];
    Value wide[kColumns / 64][kTile];
  };
  static constexpr int kStages = kStageBytes / sizeof(Stage);
  using Cursor = RingCursor<kStages>;
  /// Whether a tile's values are added to in registers instead of in the L2 cache.
  static __device__ __forceinline__ bool adds_here(int num_stages) {
    if constexpr (!kAccumulate || !kPingPong) return kAccumulate;
    return kColumns <= kWgradColumnsToAddHere && num_stages < kWgradStagesToAddThere;
  }

  struct Shared {
    Stage stages[kStages];
    Barrier full[kStages];
    Barrier empty[kStages];
    Barrier begins[2];  // a warpgroup's next tile, when the other has all stages of its own
    WorkQueue<Work, kPingPong ? 2 : 1> queue;
    int tile_begin[kMaxExperts + 1];
  };
  static_assert(sizeof(Shared) <= kMaxShared);
};

template <typename W>
struct Plan {
  using Work = typename W::Work;
  using Operands = typename W::Operands;
  const typename W::Params& params;
  GroupedTiles tiles;

  __device__ int size(int expert) const {
    return params.block_begin[expert + 1] - params.block_begin[expert];
  }
  /// Of the expert's gradient.
  __device__ int rows(int expert) const {
    if constexpr (W::kSparse == SparseOperand::kColumns) return params.dense_columns;
    return size(expert);
  }
  __device__ int columns(int expert) const {
    return W::kSparse == SparseOperand::kColumns ? size(expert) : params.num_columns;
  }
  __device__ int pairs(int expert) const { return (rows(expert) + kRows - 1) / kRows; }
  __device__ int column_tiles(int expert) const {
    return (columns(expert) + W::kClusterColumns - 1) / W::kClusterColumns;
  }
  __device__ bool has_tokens(int expert) const {
    if constexpr (W::kIsSparse) {
      return params.values.num_rows(params.block_begin[expert]) > 0;
    } else {
      return params.offsets[expert + 1] > params.offsets[expert];
    }
  }

  __device__ Work work(int tile) const {
    const int expert = tiles.expert_of(tile);
    const GroupedTile at = tiles.locate(tile, column_tiles(expert), pairs(expert), expert);
    const int begin = params.block_begin[expert];
    if constexpr (W::kIsSparse) {
      const int num_tokens = params.values.num_rows(begin);
      return {.expert = expert,
              .row = at.minor * kRows,
              .size = size(expert),
              .column = at.major * W::kClusterColumns,
              .block_begin = begin,
              .first_token = num_tokens > 0 ? params.values.first_row(begin) : 0,
              .values = params.values.first_value(begin),
              .num_stages = num_tokens / kTokens};
    } else {
      const int64_t first = params.offsets[expert];
      const int num_tokens = static_cast<int>(params.offsets[expert + 1] - first);
      return {.expert = expert,
              .row = at.minor * kRows,
              .num_rows = rows(expert),
              .column = at.major * W::kClusterColumns,
              .block_begin = begin,
              .first_token = Operands::first_token(first, expert),
              .num_tokens = num_tokens,
              .num_stages = (num_tokens + Operands::kTokens - 1) / Operands::kTokens};
    }
  }
};

}  // namespace wgrad
}  // namespace tessera::cuda
