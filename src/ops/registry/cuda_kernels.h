#pragma once

#include "ops/operator.h"

namespace tessera {

/// The kernels for Hopper GPUs, of the operators that have one.
KernelTable make_cuda_kernels();

}  // namespace tessera
