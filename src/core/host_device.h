#pragma once

/// Marks small functions that kernels for CPUs and for GPUs share.
#ifdef __CUDACC__
#define TESSERA_HOST_DEVICE __host__ __device__
#else
#define TESSERA_HOST_DEVICE
#endif

/// The same for those that vector code of several CPU levels calls (ops/cpu_dispatch.h): of copies
/// that are not inlined the linker would keep one, of any level.
#define TESSERA_HOST_DEVICE_INLINE TESSERA_HOST_DEVICE inline __attribute__((always_inline))
