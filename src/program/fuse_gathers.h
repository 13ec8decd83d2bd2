#pragma once

#include "ops/backend.h"
#include "ops/gather.h"
#include "program/program.h"

namespace tessera {

/// Lets the operators that read the rows of a gather (GathersRows, as permute) gather these
/// themselves (TakesGather, ops/gather.h), so that no copy of the rows is made, or kept for the
/// backward pass. A gather is fused where all that reads it can do so, it is no output of the
/// program, and what it gathers from is no larger at the bound than its rows, since that lives, or
/// is kept, in their place; with kAuto also only on a GPU and where making the rows takes longer
/// than what gathering adds to their readers, and to the gradients of these where the program will
/// be `differentiated`. The bits stay. Values keep their ids; rows that are no longer made have no
/// node.
Program fuse_gathers(const Program& program, GatherFusion which, const Backend& backend,
                     bool differentiated);

}  // namespace tessera
