#pragma once

/// Marks small functions that kernels for CPUs and for GPUs share.
#ifdef __CUDACC__
#define TESSERA_HOST_DEVICE __host__ __device__
#else
#define TESSERA_HOST_DEVICE
#endif
