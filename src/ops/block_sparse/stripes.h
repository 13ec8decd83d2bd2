#pragma once

#include <cstdint>

#include "ops/block_sparse/topology.h"

namespace tessera {

/// Which way a block-sparse matrix is walked: by block-rows (CSR), or by block-columns (transpose
/// indices).
enum class WalkOrder { kRows, kCols };

/// Consecutive block-rows (or block-columns) first .. last-1 whose blocks stand in the same columns
/// (rows). Together with runs of neighbouring blocks across them, blocks join into the largest
/// dense rectangles that the topology has, so that a product of experts becomes one large product
/// each, as fast as a grouped one.
struct Stripe {
  WalkOrder order = WalkOrder::kRows;
  int64_t first = 0;
  int64_t last = 0;

  int64_t extent() const { return last - first; }
};

/// Blocks of a stripe that are one dense matrix in memory: its rows (columns) crossed with the
/// neighbouring columns (rows) cross_first .. cross_last-1. `offset` and `ld`, in elements, address
/// the matrix as it is stored, whatever the order of the walk.
struct Rectangle {
  int64_t cross_first = 0;
  int64_t cross_last = 0;
  int64_t offset = 0;
  int64_t ld = 0;
};

/// The stripe that starts at row (column) `first`, which must exist.
Stripe stripe_at(const TopologyView& topology, WalkOrder order, int64_t first);
/// How many rows (columns) a walk passes.
int64_t walk_length(const TopologyView& topology, WalkOrder order);
/// Blocks in the first row (column) of the stripe.
int64_t num_cross_blocks(const TopologyView& topology, const Stripe& stripe);
/// The rectangle that starts at cross block `position` of the stripe, and moves `position` past it.
Rectangle next_rectangle(const TopologyView& topology, const Stripe& stripe, int64_t& position);

/// Calls body(stripe) for every stripe in order. Empty rows (columns) make stripes without blocks.
template <typename Body>
void for_each_stripe(const TopologyView& topology, WalkOrder order, Body&& body) {
  const int64_t length = walk_length(topology, order);
  for (int64_t first = 0; first < length;) {
    const Stripe stripe = stripe_at(topology, order, first);
    body(stripe);
    first = stripe.last;
  }
}

/// Calls body(rectangle) for every rectangle of a stripe in order.
template <typename Body>
void for_each_rectangle(const TopologyView& topology, const Stripe& stripe, Body&& body) {
  const int64_t num_blocks = num_cross_blocks(topology, stripe);
  for (int64_t position = 0; position < num_blocks;)
    body(next_rectangle(topology, stripe, position));
}

}  // namespace tessera
