#include "ops/block_sparse/stripes.h"

#include <algorithm>

namespace tessera {
namespace {

int64_t at(std::span<const int32_t> values, int64_t idx) {
  return values[idx];
}

std::span<const int32_t> cols_of_row(const TopologyView& topology, int64_t row) {
  return topology.col_indices.subspan(at(topology.row_offsets, row), topology.row_width(row));
}

std::span<const int32_t> blocks_of_col(const TopologyView& topology, int64_t col) {
  const int64_t start = at(topology.col_offsets, col);
  return topology.transpose_indices.subspan(start, at(topology.col_offsets, col + 1) - start);
}

/// Whether rows (columns) a and b have blocks in the same columns (rows).
bool cross_alike(const TopologyView& topology, WalkOrder order, int64_t a, int64_t b) {
  if (order == WalkOrder::kRows)
    return std::ranges::equal(cols_of_row(topology, a), cols_of_row(topology, b));
  const auto row_of = [&](int32_t block) { return at(topology.row_indices, block); };
  return std::ranges::equal(blocks_of_col(topology, a), blocks_of_col(topology, b), {}, row_of,
                            row_of);
}

Rectangle next_in_row(const TopologyView& topology, const Stripe& stripe, int64_t& position) {
  const auto cols = cols_of_row(topology, stripe.first);
  const int64_t size = topology.block_size;
  const int64_t width = topology.row_width(stripe.first);
  Rectangle rectangle;
  rectangle.cross_first = at(cols, position);
  rectangle.ld = width * size;
  rectangle.offset = at(topology.row_offsets, stripe.first) * size * size + position * size;
  rectangle.cross_last = rectangle.cross_first;
  while (position < width && at(cols, position) == rectangle.cross_last) {
    ++position;
    ++rectangle.cross_last;
  }
  return rectangle;
}

/// A block's place in its row and the row's width: rows in which both agree continue one matrix
/// downwards.
struct Place {
  int64_t row = 0;
  int64_t position = 0;
  int64_t width = 0;
};

Place place_of(const TopologyView& topology, int64_t block) {
  const int64_t row = at(topology.row_indices, block);
  return {row, block - at(topology.row_offsets, row), topology.row_width(row)};
}

Rectangle next_in_col(const TopologyView& topology, const Stripe& stripe, int64_t& position) {
  const auto blocks = blocks_of_col(topology, stripe.first);
  const int64_t size = topology.block_size;
  const Place start = place_of(topology, at(blocks, position));
  Rectangle rectangle;
  rectangle.cross_first = start.row;
  rectangle.cross_last = start.row + 1;
  rectangle.ld = start.width * size;
  rectangle.offset = at(topology.row_offsets, start.row) * size * size + start.position * size;
  for (++position; position < static_cast<int64_t>(blocks.size()); ++position) {
    const Place place = place_of(topology, at(blocks, position));
    const bool continues = place.row == rectangle.cross_last && place.position == start.position &&
                           place.width == start.width;
    if (!continues) break;
    ++rectangle.cross_last;
  }
  return rectangle;
}

}  // namespace

int64_t walk_length(const TopologyView& topology, WalkOrder order) {
  return order == WalkOrder::kRows ? topology.num_block_rows() : topology.num_block_cols();
}

Stripe stripe_at(const TopologyView& topology, WalkOrder order, int64_t first) {
  const int64_t length = walk_length(topology, order);
  Stripe stripe{order, first, first + 1};
  while (stripe.last < length && cross_alike(topology, order, first, stripe.last)) ++stripe.last;
  return stripe;
}

int64_t num_cross_blocks(const TopologyView& topology, const Stripe& stripe) {
  if (stripe.order == WalkOrder::kRows) return topology.row_width(stripe.first);
  return static_cast<int64_t>(blocks_of_col(topology, stripe.first).size());
}

Rectangle next_rectangle(const TopologyView& topology, const Stripe& stripe, int64_t& position) {
  if (stripe.order == WalkOrder::kRows) return next_in_row(topology, stripe, position);
  return next_in_col(topology, stripe, position);
}

}  // namespace tessera
