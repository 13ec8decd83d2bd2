#pragma once

#include "program/program.h"

namespace tessera {

/// Lets a node also give what another one computes of values that it reads itself, where it can
/// (GivesMore, ops/joins_producer.h): the activation that a backward pass makes again for a
/// weight's gradient comes with the activation's own gradient, and the values of both are read
/// once. Nodes that wait for what the other made stand behind the joint one then; where one of them
/// is what the joint one waits for, both stay. Dependencies are kept (find_dependencies), and so
/// are values' ids. For programs that are not differentiated any more.
Program fuse_repeats(const Program& program);

}  // namespace tessera
