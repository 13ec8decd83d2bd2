#pragma once

#include <memory>

#include "comm/communicator.h"
#include "comm/options.h"
#include "comm/transport.h"

namespace tessera {

/// A world whose ranks are joined by a transport. All ranks must call. `owns_process`: this rank is
/// a process of its own, so SIGTERM is for it; not where tests run several ranks in one process.
std::unique_ptr<World> make_process_world(std::shared_ptr<Transport> transport,
                                          const CommOptions& options, bool owns_process = true);

}  // namespace tessera
