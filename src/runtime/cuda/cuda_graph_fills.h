#pragma once

#include <cuda_runtime.h>

namespace tessera::cuda {

/// Makes kernels of a graph's fills of fewer than 64 KiB, which libraries put there too: the driver
/// launches a straight line of kernels, copies within the GPU and large fills in constant time, and
/// each small fill interrupts it, which takes the host 1.7 us and the GPU 1.5 (H100, CUDA 13.0).
/// Before the graph is made executable.
void replace_small_fills(cudaGraph_t graph);

}  // namespace tessera::cuda
