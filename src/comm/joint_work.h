#pragma once

#include <vector>

#include "comm/communicator.h"

namespace tessera {

/// Started operations that are one to whoever waits.
Pending join_pending(std::vector<Pending> all);

}  // namespace tessera
