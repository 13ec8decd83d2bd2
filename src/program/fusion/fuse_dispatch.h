#pragma once

#include <span>

#include "program/program.h"

namespace tessera {

/// Joins a permutation with the exchange that alone reads its rows (DispatchRows), where the device
/// counts these, its communicator can gather rows as it sends them, and rows are long enough to be
/// moved one by one. The bits stay, values keep their ids; rows that are no longer made have no
/// node. `kept` outlive the program's runs.
Program fuse_dispatch(const Program& program, std::span<const ValueId> kept);

}  // namespace tessera
