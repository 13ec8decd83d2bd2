#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tessera::cuda {

/// Rows of a matrix F32 or BF16; `extent`, unless null, is where the GPU has the number of rows
/// that count.
struct LinearRows {
  const void* data = nullptr;
  bool bf16 = false;
  int64_t num_rows = 0;
  int64_t num_columns = 0;
  const int64_t* extent = nullptr;
};

/// Chunks of rows whose sums are made apart and added in order.
constexpr int64_t kLinearSumChunks = 64;

/// sums[column] += Σ rows[:, column], in an order given by the number of rows alone. `partial` has
/// room for kLinearSumChunks · num_columns values.
void launch_column_sums(const LinearRows& rows, float* partial, float* sums, cudaStream_t stream);

/// out = products + bias, rounded once. products F32 [num_rows, num_columns] may be out.
void launch_add_bias(const float* products, const float* bias, void* out, bool bf16,
                     int64_t num_rows, int64_t num_columns, cudaStream_t stream);

/// offsets = {0, *extent}: the rows as those of a single expert.
void launch_row_range(const int64_t* extent, int64_t* offsets, cudaStream_t stream);

}  // namespace tessera::cuda
