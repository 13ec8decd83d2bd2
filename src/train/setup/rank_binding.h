#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "core/process/processors.h"
#include "train/setup/settings.h"

namespace tessera {

/// Which processors each rank of one machine takes, where run.bind is kNuma or kCores. `near` has
/// for each of them the number of the NUMA node that its GPU is connected to, or -1: then ranks are
/// spread evenly over the nodes. kNuma gives a rank all processors of its node, or nodes; kCores
/// gives the ranks of a node equal shares of its cores, or one core to several where they are
/// fewer.
std::vector<std::vector<int>> share_processors(std::span<const NumaNode> nodes, RankBinding mode,
                                               std::span<const int> near);

/// Binds this process to its processors as run.bind asks; all ranks call. `gpu` is the place of its
/// GPU among those that it sees, -1 for none. "auto" binds to NUMA nodes where the machine has
/// several and nobody has bound the process before. OpenMP's threads are made no more than the
/// processors. Returns what was done, or nothing. Throws UserError where the process is bound
/// already, or cannot be.
std::string bind_rank(const Settings& settings, World& world, int gpu);

}  // namespace tessera
