#pragma once

#include "ops/operator.h"

namespace tessera {

/// The CPU kernel of every operator.
KernelTable make_cpu_kernels();
/// The same for decoding in batches: the products of a forward pass are those of gemm_of_rows, so
/// that a token's results do not depend on the tokens beside it.
KernelTable make_cpu_kernels_of_rows();

}  // namespace tessera
