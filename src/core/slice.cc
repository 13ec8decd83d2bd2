#include "core/slice.h"

#include <algorithm>
#include <cstring>

namespace tessera {
namespace {

int64_t global_columns(const Shape& global) {
  return global.rank() == 2 ? global[1] : 1;
}

/// Adds a range after the others, joined with the last one where they touch.
void append(std::vector<IndexRange>& ranges, IndexRange range) {
  if (range.count == 0) return;
  if (!ranges.empty() && ranges.back().end() == range.begin) {
    ranges.back().count += range.count;
  } else {
    ranges.push_back(range);
  }
}

/// Calls visit(local byte offset, global byte offset, bytes) for each contiguous run.
template <typename Visit>
void for_each_run(const Slice& slice, int64_t element_size, const Visit& visit) {
  const int64_t width = global_columns(slice.global);
  const int64_t row_bytes = slice.columns.count * element_size;
  if (row_bytes == 0) return;
  int64_t local = 0;
  for (const IndexRange& range : slice.rows) {
    if (slice.columns.count == width) {
      visit(local, range.begin * row_bytes, range.count * row_bytes);
      local += range.count * row_bytes;
      continue;
    }
    for (int64_t row = range.begin; row < range.end(); ++row) {
      visit(local, (row * width + slice.columns.begin) * element_size, row_bytes);
      local += row_bytes;
    }
  }
}

void check_copy(const Slice& slice, const Tensor& whole, const Tensor& local) {
  ensure(whole.shape == slice.global && local.shape == slice.shape() && whole.dtype == local.dtype,
         "slice {}: copied between {} {} and {} {}", slice.to_string(), dtype_name(whole.dtype),
         whole.shape.to_string(), dtype_name(local.dtype), local.shape.to_string());
}

}  // namespace

Slice Slice::whole(const Shape& global) {
  return of_rows(global, {{0, global[0]}});
}

Slice Slice::of_rows(const Shape& global, std::vector<IndexRange> rows) {
  ensure(global.rank() == 1 || global.rank() == 2, "a slice of shape {}", global.to_string());
  Slice slice{.global = global, .rows = {}, .columns = {0, global_columns(global)}};
  for (const IndexRange& range : rows) {
    ensure(range.begin >= 0 && range.count >= 0 && range.end() <= global[0], "rows [{}, {}) of {}",
           range.begin, range.end(), global.to_string());
    append(slice.rows, range);
  }
  return slice;
}

Slice Slice::of_columns(const Shape& global, IndexRange columns) {
  Slice slice = whole(global);
  ensure(
      global.rank() == 2 && columns.begin >= 0 && columns.count >= 0 && columns.end() <= global[1],
      "columns [{}, {}) of {}", columns.begin, columns.end(), global.to_string());
  slice.columns = columns;
  return slice;
}

int64_t Slice::num_rows() const {
  int64_t total = 0;
  for (const IndexRange& range : rows) total += range.count;
  return total;
}

Shape Slice::shape() const {
  return global.rank() == 1 ? Shape{num_rows()} : Shape{num_rows(), columns.count};
}

Slice Slice::take_rows(int64_t first, int64_t count) const {
  ensure(first >= 0 && count >= 0 && first + count <= num_rows(), "rows [{}, {}) of slice {}",
         first, first + count, to_string());
  Slice part{.global = global, .rows = {}, .columns = columns};
  int64_t at = 0;
  for (const IndexRange& range : rows) {
    const int64_t begin = std::max(first, at);
    const int64_t end = std::min(first + count, at + range.count);
    if (begin < end) append(part.rows, {range.begin + begin - at, end - begin});
    at += range.count;
  }
  return part;
}

std::string Slice::to_string() const {
  std::string text = "rows";
  for (const IndexRange& range : rows) text += fmt::format(" [{}, {})", range.begin, range.end());
  if (columns.count != global_columns(global))
    text += fmt::format(" columns [{}, {})", columns.begin, columns.end());
  return text + " of " + global.to_string();
}

void copy_slice_from(const Slice& slice, const Tensor& whole, const Tensor& local) {
  check_copy(slice, whole, local);
  for_each_run(slice, dtype_size(whole.dtype), [&](int64_t to, int64_t from, int64_t bytes) {
    std::memcpy(static_cast<std::byte*>(local.data) + to,
                static_cast<const std::byte*>(whole.data) + from, bytes);
  });
}

void copy_slice_into(const Slice& slice, const Tensor& local, const Tensor& whole) {
  check_copy(slice, whole, local);
  for_each_run(slice, dtype_size(whole.dtype), [&](int64_t from, int64_t to, int64_t bytes) {
    std::memcpy(static_cast<std::byte*>(whole.data) + to,
                static_cast<const std::byte*>(local.data) + from, bytes);
  });
}

}  // namespace tessera
