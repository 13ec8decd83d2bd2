#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "ops/column_sums_size.h"
#include "ops/simd.h"
#include "ops/storage.h"

namespace tessera {

/// Calls add_row(row, sums) for every row, which adds the row's terms into sums[0..cols), and adds
/// the totals into `accumulator` unless it is null.
template <typename AddRow>
void add_column_sums(float* accumulator, int64_t rows, int64_t cols, std::span<std::byte> workspace,
                     AddRow add_row) {
  auto* partial = reinterpret_cast<float*>(workspace.data());
  const int64_t chunk_rows =
      std::max(kMinRowsOfChunk, (rows + kColumnSumChunks - 1) / kColumnSumChunks);
  const int64_t num_chunks = (rows + chunk_rows - 1) / chunk_rows;
#pragma omp parallel for schedule(static)
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    float* sums = partial + chunk * cols;
    std::fill_n(sums, cols, 0.0F);
    const int64_t end = std::min(rows, (chunk + 1) * chunk_rows);
    for (int64_t row = chunk * chunk_rows; row < end; ++row) add_row(row, sums);
  }
  if (accumulator == nullptr) return;
  simd::for_each_vector(cols, [=](int64_t i, auto lanes) {
    simd::Vec total{};
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      total += simd::load(partial + chunk * cols + i, lanes);
    }
    simd::store(accumulator + i, simd::load(accumulator + i, lanes) + total, lanes);
  });
}

/// Adds the sums of the columns of rows A [T, cols], F32 or BF16, into `accumulator`.
inline void add_columns_of(const Tensor& rows, float* accumulator, std::span<std::byte> workspace) {
  const int64_t cols = rows.shape[1];
  with_storage(rows.dtype, [&](auto storage) {
    const auto* from = rows.as<decltype(storage)>();
    add_column_sums(accumulator, rows.shape[0], cols, workspace, [=](int64_t row, float* sums) {
      simd::for_each_vector(cols, [=](int64_t i, auto lanes) {
        const simd::Vec term = simd::load(from + row * cols + i, lanes);
        simd::store(sums + i, simd::load(sums + i, lanes) + term, lanes);
      });
    });
  });
}

}  // namespace tessera
