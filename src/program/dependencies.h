#pragma once

#include <vector>

#include "program/program.h"

namespace tessera {

/// The values that a node touches. Extents of ragged values count as read; accumulators as written.
struct NodeAccess {
  std::vector<ValueId> reads;
  std::vector<ValueId> writes;
};
NodeAccess find_access(const Program& program, const Node& node);
/// Whether an exchange must be complete before a later node runs, which reads or writes one of its
/// outputs, or writes what it reads.
bool must_wait(const NodeAccess& exchange, const NodeAccess& later);

/// For each node the earlier nodes that must run before it, ascending: those that make what it
/// reads; those that wrote before it to an accumulator that it touches, or read one that it writes;
/// and, where it communicates, the last node before it that does. Any order of the nodes that keeps
/// these computes the same bits, and ranks that run the same operators exchange in the same order.
/// Bound values must not share memory.
std::vector<std::vector<int>> find_dependencies(const Program& program);

/// For each node, the node before which it must be complete: the next one, and for a node that
/// communicates or runs aside the first that must wait for it; the number of nodes where there is
/// none.
std::vector<int> find_waits(const Program& program);

}  // namespace tessera
