#pragma once

#include <functional>
#include <vector>

#include "program/program.h"

namespace tessera {

/// Where a value lives while a program runs.
enum class Storage {
  kBound,      ///< the caller binds it: inputs, weights, accumulators and outputs
  kSaved,      ///< in the saved slab, which outlives the run
  kOffloaded,  ///< in the offloaded slab, likewise, which may be elsewhere until it is read again
  kTransient,  ///< in the transient slab, from its node to its last use, exchanges included
};

struct Placement {
  Storage storage = Storage::kBound;
  int64_t offset = 0;
};

/// Memory of one program, known before it runs. Ragged values take their bounds.
struct MemoryPlan {
  IdVector<ValueId, Placement> values;
  std::vector<int64_t> workspace_offsets;  ///< by node, in the transient slab
  std::vector<int64_t> workspace_bytes;    ///< by node
  int64_t saved_bytes = 0;
  int64_t offloaded_bytes = 0;
  int64_t transient_bytes = 0;
};

/// First and last node that touch a value (-1, -1: none). A node that communicates touches its
/// values until just before the node that waits for it (program/dependencies.h).
struct Lifetime {
  int first = -1;
  int last = -1;
};
IdVector<ValueId, Lifetime> find_lifetimes(const Program& program);
/// The same for the scratch memory of each node.
std::vector<Lifetime> find_workspace_lifetimes(const Program& program);

/// Memory that is wanted from the first to the last of some steps.
struct MemoryRequest {
  int64_t num_bytes = 0;
  Lifetime lifetime;
  int64_t* offset = nullptr;  ///< where it is placed
};

/// Places all requests, which it sorts, and returns the bytes that they need together: those whose
/// lifetimes do not meet share memory, the largest first at the lowest free offset (greedy by size,
/// Pisarchyk and Lee, "Efficient memory management for deep neural net inference", 2020).
int64_t place_requests(std::vector<MemoryRequest>& requests);

/// Scratch memory of an operator's kernel for inputs of these types.
using WorkspaceRule = std::function<int64_t(const Operator& op, std::span<const ValueType> inputs)>;

/// Plans the slabs: transient values share memory as place_requests lets them. `saved` are
/// intermediates that outlive the run; those of them that are `offloaded` have a slab of their own.
/// Without `workspace`, kernels have no scratch memory.
MemoryPlan plan_memory(const Program& program, const std::vector<ValueId>& saved,
                       const WorkspaceRule& workspace = {},
                       const std::vector<ValueId>& offloaded = {});

}  // namespace tessera
