#pragma once

#include "comm/thread/thread_hub.h"

namespace tessera {

/// Carries out an operation to which all ranks have come. Throws InternalError, which names the
/// ranks, where their parts do not fit together.
void run_thread_operation(const ThreadGroup& group, const ThreadOperation& operation);

}  // namespace tessera
