#pragma once

#include "ops/operator.h"

namespace tessera {

/// What operators that move rows by route_map's maps share: see permute.h.

/// Throw UserError naming the operator unless the type is that of the map.
void check_source(const Operator& op, const ValueType& source_R);
void check_row_of(const Operator& op, const ValueType& row_of_TK);
/// Throws UserError naming `what` unless both have the same first dim.
void check_same_first_dim(const Operator& op, const ValueType& a, const ValueType& b,
                          std::string_view what);

/// [R, width] for the rows of source_R, [T, width] for the tokens of row_of_TK: ragged as they are.
ValueType rows_like(const ValueType& map, DType dtype, int64_t width);

/// K of row_of_TK or of probabilities, which are [T, K] or [T].
inline int64_t top_k_of(const Shape& shape) {
  return shape.rank() == 1 ? 1 : shape[1];
}

/// Bytes of the scales that belong to one row.
int64_t scale_bytes_of_row(const Tensor& rows);

/// Asks for memory that is about to be read.
inline void prefetch_bytes(const void* from, int64_t num_bytes) {
  constexpr int64_t kLine = 64;
  for (int64_t i = 0; i < num_bytes; i += kLine)
    __builtin_prefetch(static_cast<const std::byte*>(from) + i);
}

/// On the host: row r of `rows` [R, H] is row source_R[r] / top_k of `x` [T, H], zeros where
/// source_R[r] is negative. On all threads.
/// Scales go along with their rows.
void gather_rows(const Tensor& x, const Tensor& source_R, int64_t top_k, const Tensor& rows);

}  // namespace tessera
