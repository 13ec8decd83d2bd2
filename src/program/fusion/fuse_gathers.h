#pragma once

#include <functional>

#include "ops/backend.h"
#include "ops/gather.h"
#include "program/program.h"

namespace tessera {

/// What becomes of a program after its gathers were fused.
struct GatherUse {
  bool differentiated = false;
  /// Whether the backward pass will make a value again; none where this is empty.
  std::function<bool(ValueId)> made_again = {};
};

/// Lets the operators that read the rows of a gather (GathersRows, as permute) gather these
/// themselves (TakesGather, ops/gather.h), so that no copy of the rows is made, or kept for the
/// backward pass. A gather is fused where all that reads it can do so, it is no output of the
/// program, and what it gathers from is no larger at the bound than its rows, since that lives, or
/// is kept, in their place. With kAuto it must also be a GPU, and making the rows must take longer
/// than what gathering adds to their readers; where they would be kept, what the backward pass
/// needs in their place may take half as much time more than making them. The bits stay, but
/// for gradients of what several readers gather (experts and their adapters): each adds its own up
/// by token, where with a copy their rows are added first. Values keep their ids; rows that are no
/// longer made have no node.
Program fuse_gathers(const Program& program, GatherFusion which, const Backend& backend,
                     const GatherUse& use);

}  // namespace tessera
