#pragma once

#include <cuda_runtime.h>

#include <cstdio>

namespace tessera::cuda {

/// Ends the kernel with an error, which the device's next synchronisation throws, for input that
/// must not be: the CPU's kernels throw InternalError there. What and which value go to standard
/// output.
__device__ __noinline__ inline void fail(const char* what, long long value) {
  printf("%s: %lld\n", what, value);
  __trap();
}

}  // namespace tessera::cuda
