#pragma once

#include <cstdint>
#include <functional>

#include "comm/communicator.h"
#include "comm/options.h"

namespace tessera {

/// Runs `body` once for each of `num_ranks` ranks, which are threads of this process and share its
/// memory, and returns when all have ended. Each rank gets its share of the cores for OpenMP.
///
/// Whoever comes last to an operation carries it out for all: so it progresses whatever the ranks
/// wait for meanwhile. Sums are in the order of the ranks, in the bits of every other back end.
/// Where a rank starts another operation than its peers, or other sizes, all learn which.
///
/// If a body throws, waits of the other ranks throw CommError, and the first exception is thrown
/// from here.
void run_thread_world(int64_t num_ranks, const std::function<void(World&)>& body,
                      const CommOptions& options = {});

}  // namespace tessera
