#pragma once

#include <memory>

#include "comm/communicator.h"
#include "comm/options.h"
#include "comm/transport.h"

namespace tessera {

/// make_process_world, where ranks that are processes of one machine exchange messages from
/// CommOptions::shared_bytes on through each other's memory (ShmLink); shorter ones, and those to
/// other machines, go by the transport. All ranks must call. Throws as join_by_memory.
std::unique_ptr<World> make_shared_world(std::shared_ptr<Transport> transport,
                                         const CommOptions& options, bool owns_process = true);

}  // namespace tessera
