#include "ops/permute/row_maps.h"

#include <algorithm>
#include <cstring>

namespace tessera {

void check_source(const Operator& op, const ValueType& source_R) {
  check_shape(op, source_R.dtype == DType::kI32 && source_R.shape.rank() == 1,
              "source_R must be i32 [R], got {}", source_R.to_string());
}

void check_row_of(const Operator& op, const ValueType& row_of_TK) {
  const int rank = row_of_TK.shape.rank();
  check_shape(op, row_of_TK.dtype == DType::kI32 && (rank == 1 || rank == 2),
              "row_of_TK must be i32 [T, K] or [T], got {}", row_of_TK.to_string());
}

void check_same_first_dim(const Operator& op, const ValueType& a, const ValueType& b,
                          std::string_view what) {
  check_shape(op, a.shape[0] == b.shape[0], "{} differ in their first dim: {} and {}", what,
              a.to_string(), b.to_string());
}

ValueType rows_like(const ValueType& map, DType dtype, int64_t width) {
  ValueType type = map;
  type.dtype = dtype;
  type.shape = {map.shape[0], width};
  return type;
}

namespace {

/// Rows lie anywhere, so processors do not foresee which one is next.
constexpr int64_t kRowsAhead = 4;

void gather_bytes(const void* x, int64_t row_bytes, const Tensor& source_R, int64_t top_k,
                  void* rows) {
  const int32_t* source = source_R.as<int32_t>();
  const auto* from = static_cast<const std::byte*>(x);
  auto* to = static_cast<std::byte*>(rows);
  const int64_t num_rows = source_R.shape[0];
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < num_rows; ++r) {
    const int64_t ahead = std::min(r + kRowsAhead, num_rows - 1);
    if (source[ahead] >= 0) prefetch_bytes(from + source[ahead] / top_k * row_bytes, row_bytes);
    std::byte* row = to + r * row_bytes;
    if (source[r] < 0) {
      std::memset(row, 0, row_bytes);
    } else {
      std::memcpy(row, from + source[r] / top_k * row_bytes, row_bytes);
    }
  }
}

}  // namespace

int64_t scale_bytes_of_row(const Tensor& rows) {
  return rows.shape[0] == 0 ? 0 : scales_of(rows).num_bytes() / rows.shape[0];
}

void gather_rows(const Tensor& x, const Tensor& source_R, int64_t top_k, const Tensor& rows) {
  gather_bytes(x.data, x.shape[1] * dtype_size(x.dtype), source_R, top_k, rows.data);
  if (!x.scale.is_scaled() || rows.shape[0] == 0) return;
  gather_bytes(scales_of(x).data, scale_bytes_of_row(rows), source_R, top_k, scales_of(rows).data);
}

}  // namespace tessera
