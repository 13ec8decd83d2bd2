#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tessera::cuda {

/// Ends the kernel with an error where the counts are not what the host has used in their place.
/// The GPU reaches both.
void launch_count_check(const int64_t* counts, const int64_t* used, int64_t size,
                        cudaStream_t stream);

}  // namespace tessera::cuda
