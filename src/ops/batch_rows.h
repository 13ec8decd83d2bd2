#pragma once

#include <span>
#include <vector>

#include "ops/operator.h"

/// The rows of a pass over several sequences, each of which goes on behind earlier tokens whose
/// state is kept in a slot.
namespace tessera {

struct BatchBounds {
  std::span<const int32_t> cu_seqlens;  ///< [S+1]: sequence s is the rows from one to the next
  std::span<const int32_t> lengths;     ///< [S] tokens of the sequences, these rows included
  std::span<const int32_t> slots;       ///< [S]
};

/// A sequence that has rows.
struct BatchRows {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t slot = 0;
  bool is_first = false;  ///< no token came before
};

/// Throws UserError unless the types are those of cu_seqlens, lengths and slots.
inline void check_batch_rows(const Operator& op, std::span<const ValueType> bounds) {
  const int64_t num_sequences = bounds[0].shape.num_elements() - 1;
  const ValueType each{DType::kI32, {num_sequences}};
  check_shape(op, bounds[1] == each && bounds[2] == each,
              "lengths and slots are {} and {}, expected {}", bounds[1].to_string(),
              bounds[2].to_string(), each.to_string());
}

/// Those that have rows. Throws UserError unless bounds rise from 0 to at most `num_rows`, and
/// lengths and slots are possible.
inline std::vector<BatchRows> read_batch_rows(const Operator& op, const BatchBounds& bounds,
                                              int64_t num_rows, int64_t num_slots) {
  std::vector<BatchRows> rows;
  int64_t begin = 0;
  for (size_t s = 0; s < bounds.lengths.size(); ++s) {
    const int64_t end = bounds.cu_seqlens[s + 1];
    const int64_t length = bounds.lengths[s];
    const int64_t slot = bounds.slots[s];
    check_shape(op, bounds.cu_seqlens[0] == 0 && begin <= end && end <= num_rows,
                "cu_seqlens goes from {} to {} of {} rows", begin, end, num_rows);
    if (end > begin) {
      check_shape(op, length >= end - begin && slot >= 0 && slot < num_slots,
                  "{} new tokens of a sequence of {} in slot {} of {}", end - begin, length, slot,
                  num_slots);
      rows.push_back({begin, end, slot, length == end - begin});
    }
    begin = end;
  }
  return rows;
}

/// Behind the rows of all sequences.
inline int64_t end_of_rows(std::span<const BatchRows> rows) {
  return rows.empty() ? 0 : rows.back().end;
}

}  // namespace tessera
