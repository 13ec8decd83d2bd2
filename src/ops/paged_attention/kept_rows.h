#pragma once

#include "ops/operator.h"

namespace tessera {

/// Where what operators read of sequences' tokens lies.
enum class KeptRows {
  kPacked,  ///< it is of the tokens in hand, of sequence behind sequence
  kCached,  ///< it is kept of one sequence, whose next tokens are in hand, by position
  kPaged,   ///< of several, by position in their pages (PagedAttention)
};

/// Beside positions I32 [T], tokens over pages have cu_seqlens I32 [S + 1] and page_table I32
/// [S, M], from input `first` on. Throws UserError for other types.
inline void check_kept_inputs(const Operator& op, KeptRows kept, std::span<const ValueType> inputs,
                              int first) {
  if (kept != KeptRows::kPaged) return;
  const ValueType& table = inputs[first + 1];
  check_shape(op, table.dtype == DType::kI32 && table.shape.rank() == 2,
              "page_table is {}, expected i32 [S, M]", table.to_string());
  const ValueType bounds{DType::kI32, {table.shape[0] + 1}};
  check_shape(op, inputs[first] == bounds, "cu_seqlens is {}, expected {}",
              inputs[first].to_string(), bounds.to_string());
}
inline int num_kept_inputs(KeptRows kept) {
  return kept == KeptRows::kPaged ? 2 : 0;
}

}  // namespace tessera
