#pragma once

#include <cuda_runtime.h>

namespace tessera::cuda {

/// Makes kernels of a graph's fills and copies of fewer than 64 KiB, which libraries put there too,
/// copies from and to pinned memory among them: the driver launches a straight line of kernels,
/// copies within the GPU and large fills in constant time. Each small fill interrupts it, which
/// takes the host 1.7 us and the GPU 1.5 (H100, CUDA 13.0), each copy from or to the host takes the
/// host 1.8 us and the GPU 7 before and behind it (H200). Before the graph is made executable.
void replace_small_operations(cudaGraph_t graph);

}  // namespace tessera::cuda
