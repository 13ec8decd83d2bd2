#pragma once

#include "ops/operator.h"

namespace tessera {

/// The CPU kernel of every operator.
KernelTable make_cpu_kernels();

}  // namespace tessera
