#pragma once

#include <cuda_runtime.h>

#include <cstdio>

// What assert calls, whether or not assertions are compiled in.
extern "C" __device__ void __assertfail(const char* message, const char* file, unsigned line,
                                        const char* function, size_t char_size);

namespace tessera::cuda {

/// Ends the kernel with an error, which the device's next synchronisation throws, for input that
/// must not be: the CPU's kernels throw there. `what`, which names the operator, goes to standard
/// error, the wrong value before it to standard output.
__device__ __noinline__ inline void fail(const char* what, long long value) {
  printf("%s: %lld\n", what, value);
  __assertfail(what, "a kernel's input", 0, "fail", 1);
}

}  // namespace tessera::cuda
