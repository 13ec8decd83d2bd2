#pragma once

#include <numeric>
#include <span>

#include "comm/copy.h"
#include "core/tensor.h"

namespace tessera {

/// Elements and bytes of one index of the first dim, also where it has no rows.
inline int64_t row_elements(const Tensor& tensor) {
  ensure(tensor.shape.rank() > 0, "rows of a tensor without dims");
  int64_t elements = 1;
  for (int dim = 1; dim < tensor.shape.rank(); ++dim) elements *= tensor.shape[dim];
  return elements;
}
inline int64_t row_bytes(const Tensor& tensor) {
  return row_elements(tensor) * dtype_size(tensor.dtype);
}

inline int64_t sum_rows(std::span<const int64_t> rows) {
  return std::accumulate(rows.begin(), rows.end(), int64_t{0});
}
/// Where part `index` begins.
inline int64_t rows_before(std::span<const int64_t> rows, int64_t index) {
  return sum_rows(rows.first(index));
}

/// The address of an index of the first dim.
inline std::byte* row_data(const Tensor& tensor, int64_t row) {
  return static_cast<std::byte*>(tensor.data) + row * row_bytes(tensor);
}

}  // namespace tessera
