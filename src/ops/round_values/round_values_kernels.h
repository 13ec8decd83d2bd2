#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/dtype.h"
#include "ops/cuda/rows.h"
#include "ops/round_values/cast_spec.h"
#include "ops/round_values/tally.h"

namespace tessera::cuda {

/// Groups of rows that follow one another: those between `offsets`, which has one more than there
/// are groups, or where it is null groups of `rows` rows each, the first of which begins at row
/// `first`.
struct RowGroups {
  int count = 1;
  const int64_t* offsets = nullptr;
  int64_t first = 0;
  RowCount rows = {};  ///< of each group; with offsets the bound of all of them together
};

/// RoundValues on a GPU; see ops/round_values/round_values.h.
struct RoundedGroups {
  DType dtype;
  CastSpec cast;
  int sum_dim;
  const void* x;
  void* y;
  int64_t num_rows;  ///< of all groups, and others
  int64_t num_columns;
  RowGroups groups;
  uint32_t* scratch;  ///< round_scratch_words()
};

/// For any groups of `num_rows` rows in all.
int64_t round_scratch_words(const CastSpec& cast, int sum_dim, int64_t num_rows,
                            int64_t num_columns, int64_t num_groups);
void launch_round_values(const RoundedGroups& groups, cudaStream_t stream);

/// RoundValues by a delayed scale. Rows that follow one another: those from offsets[0] to
/// offsets[num_groups], or where there are no offsets `rows` from the first on.
struct DelayedRows {
  DType dtype;
  NarrowNumber number;
  const void* x;
  void* y;
  int64_t num_columns;
  RowCount rows;
  const int64_t* offsets;
  int64_t num_groups;
  const float* scales;
  int64_t* tally;  ///< null: nothing is counted
  int places[kMostPlaces];
  int num_places;
  bool overflows;
};
void launch_round_delayed(const DelayedRows& rows, cudaStream_t stream);

}  // namespace tessera::cuda
