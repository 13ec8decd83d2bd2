#pragma once

#include <memory>

#include "comm/communicator.h"

namespace tessera {

/// The place of rank `rank` among `size` ranks that are not there: its groups know their members,
/// so that programs are built and their memory and bytes are counted, but any communication throws
/// InternalError.
std::unique_ptr<World> make_planned_world(int64_t rank, int64_t size);

}  // namespace tessera
