#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tessera::cuda {

/// Copies pinned memory of the host, from the address that the GPU finds at `from` when it comes to
/// it, pinned too. Kernels reach such memory at the host's addresses.
void launch_found_copy(void* to, const void* const* from, int64_t num_bytes, cudaStream_t stream);

}  // namespace tessera::cuda
