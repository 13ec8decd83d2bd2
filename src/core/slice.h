#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace tessera {

/// Indices [begin, begin + count).
struct IndexRange {
  int64_t begin = 0;
  int64_t count = 0;
  int64_t end() const { return begin + count; }
  bool operator==(const IndexRange&) const = default;
};

/// The part of a global tensor of rank 1 or 2 that one rank holds: some ranges of its rows, one
/// below the other, and of those one range of columns (all of them for rank 1, where a row is an
/// element). Every way of spreading a weight over ranks is of this form: vocabulary, heads, gate
/// and up halves, experts, inner columns, and the rows of an optimizer's share.
struct Slice {
  Shape global;
  std::vector<IndexRange> rows;
  IndexRange columns;

  static Slice whole(const Shape& global);
  static Slice of_rows(const Shape& global, std::vector<IndexRange> rows);
  static Slice of_columns(const Shape& global, IndexRange columns);

  int64_t num_rows() const;
  /// The shape of the local tensor.
  Shape shape() const;
  bool is_whole() const { return *this == whole(global); }
  /// The part whose local rows are [first, first + count).
  Slice take_rows(int64_t first, int64_t count) const;
  bool operator==(const Slice&) const = default;
  /// "rows [0, 8) [16, 24) of [32, 64]".
  std::string to_string() const;
};

/// A rank's part of a global tensor, under the tensor's name. `tensor` has slice.shape().
struct NamedSlice {
  std::string name;
  Tensor tensor;
  Slice slice;
};

/// Copies a rank's part out of, or into, the whole tensor.
void copy_slice_from(const Slice& slice, const Tensor& whole, const Tensor& local);
void copy_slice_into(const Slice& slice, const Tensor& local, const Tensor& whole);

}  // namespace tessera
