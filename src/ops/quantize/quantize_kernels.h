#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/dtype.h"
#include "ops/cuda/rows.h"

namespace tessera::cuda {

/// Quantize on a GPU; see ops/quantize/quantize.h. Rows beyond `extent`, where it is not null, are
/// left as they are.
struct QuantizedRows {
  DType dtype;    ///< of x
  DType element;  ///< of y
  const void* x;
  void* y;
  float* scales;
  int64_t num_rows;
  int64_t num_columns;
  int64_t block_rows;
  int64_t block_columns;
  const int64_t* extent;
};
void launch_quantize(const QuantizedRows& rows, cudaStream_t stream);

/// The same to F16, of rows [columns].
struct HalfRows {
  DType dtype;  ///< of x
  const void* x;
  void* y;
  RowCount rows;
  int64_t num_columns;
};
void launch_round_to_half(const HalfRows& rows, cudaStream_t stream);

/// The same of matrices that are turned: x [N · rows, columns] -> y [N · columns, rows]. Rows and
/// columns are multiples of Quantize::kTurnedUnit, and x and y of 16 bytes. Scales are of a row of
/// y, or of 128 × 128, then columns are multiples of 128.
struct TurnedMatrices {
  DType dtype;
  DType element;
  const void* x;
  void* y;
  float* scales;
  int64_t num_matrices;
  int64_t num_rows;  ///< of a matrix of x
  int64_t num_columns;
  bool by_block;
};
void launch_quantize_turned(const TurnedMatrices& matrices, cudaStream_t stream);

/// TurnBlocks on a GPU; see ops/quantize/turn_blocks.h. Addresses are multiples of 4.
struct BlockMatrices {
  const uint8_t* x;
  const float* scales;
  uint8_t* y;
  float* turned_scales;
  int64_t num_matrices;
  int64_t num_rows;  ///< of a matrix of x
  int64_t num_columns;
};
void launch_turn_blocks(const BlockMatrices& matrices, cudaStream_t stream);

}  // namespace tessera::cuda
