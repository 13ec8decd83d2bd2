#pragma once

#include <cuda_runtime.h>

namespace tessera::cuda {

/// Throws InternalError with CUDA's own words.
void check(cudaError_t status);

}  // namespace tessera::cuda
