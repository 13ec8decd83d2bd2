#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/dtype.h"
#include "ops/cuda/rows.h"

namespace tessera::cuda {

/// Sums over rows for the gradients of norm weights and biases, in two stages: each block of a
/// kernel sums the rows that are its by their number alone, in order, and writes its `cols` partial
/// sums into scratch memory; then those are added in the blocks' order. So the bits depend on the
/// GPU's number of SMs, but not on chance.
constexpr int kMaxColumnPartials = 1024;

/// Scratch memory for the partial sums.
constexpr int64_t column_partials_bytes(int64_t cols) {
  return kMaxColumnPartials * cols * static_cast<int64_t>(sizeof(float));
}

/// Where sums go: they are added to what is there, or written where nothing is yet
/// (KernelArgs::set_accumulators).
struct Accumulator {
  float* sums = nullptr;
  bool sets = false;
};

/// Adds to the accumulator [cols] the sum over partials [num_partials, cols].
void launch_add_partials(Accumulator accumulator, const float* partials, int num_partials,
                         int64_t cols, cudaStream_t stream);

/// Scratch memory of launch_column_sums: the wider the rows, the more blocks share them by columns.
constexpr int64_t max_column_blocks(int64_t cols) {
  constexpr int64_t kMostColumns = 2048;  // of one block
  const int64_t slabs = (cols + kMostColumns - 1) / kMostColumns;
  return slabs <= 1 ? kMaxColumnPartials : (kMaxColumnPartials + slabs - 1) / slabs;
}
constexpr int64_t column_sums_bytes(int64_t cols) {
  return max_column_blocks(cols) * cols * static_cast<int64_t>(sizeof(float));
}

/// Adds to the accumulator [cols] the sum over rows of x [rows, cols].
struct ColumnSums {
  DType dtype;
  RowCount rows;
  int64_t cols;
  const void* x;
  Accumulator accumulator;
  float* partials;  ///< column_sums_bytes
  int num_sms;
};
void launch_column_sums(const ColumnSums& call, cudaStream_t stream);

}  // namespace tessera::cuda
