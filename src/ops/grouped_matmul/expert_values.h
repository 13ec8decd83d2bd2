#pragma once

#include <cstdint>

#include "ops/grouped_matmul/grouped_kernels.h"

/// Where the rows of a block-diagonal matrix of experts lie, for grouped products with operands or
/// results in it. Expert e's blocks are one dense matrix [R_e, g_e] (TopologyView,
/// ops/block_sparse/topology.h, has how they lie); where each begins is read from the topology in
/// the GPU's memory.
namespace tessera::cuda {

constexpr int kMaxExpertWidths = 16;  ///< different g_e of one layer
constexpr int kExpertBlockMultiple =
    64;  ///< block sizes are multiples of it: boxes end with experts

/// The matrix, and for each g_e how TMA finds rows of this many values in it (make_blocks_map). A
/// "column" is the first of an expert's, counted over all experts.
struct ExpertValues {
  const int32_t* col_offsets;
  const int32_t* row_indices;
  int block_size;
  int widths[kMaxExpertWidths];
  CUtensorMap maps[kMaxExpertWidths];

#ifdef __CUDACC__
  __device__ __forceinline__ int num_rows(int column) const {
    const int32_t* const own = col_offsets + column / block_size;
    return (own[1] - own[0]) * block_size;
  }
  /// Not of an expert without rows.
  __device__ __forceinline__ int first_row(int column) const {
    return row_indices[col_offsets[column / block_size]] * block_size;
  }
  /// Where the expert's matrix begins in the values, in 64s.
  __device__ __forceinline__ int first_value(int column) const {
    return col_offsets[column / block_size] * (block_size * block_size / 64);
  }
  __device__ __forceinline__ const CUtensorMap* map_of(int width) const {
    int i = 0;
    while (widths[i] != width) ++i;
    return &maps[i];
  }
#endif
};

/// A product of which `a` or y lies in the values; then the base's `a`, or y and y_map, are not
/// used.
struct ExpertRowsParams : GroupedRowsParams {
  ExpertValues values;
};

/// A gradient of which one operand lies in the values; then the base's map of it is not used. Its
/// num_columns are the stored gradient's.
struct ExpertWgradParams : GroupedWgradParams {
  int dense_columns;  ///< of the other operand
  ExpertValues values;
};

}  // namespace tessera::cuda
