#pragma once

#include <cuda_runtime.h>

#include "ops/cuda/check.h"

/// How kernels are launched: a kernel is started while the one before it in its stream still
/// runs, so that its start costs no time of its own (CUDA's programmatic dependent launch).
namespace tessera::cuda {

/// In the earlier kernel: the next one, if it was launched by launch_early, may take the
/// SMs that become free once all blocks have called this or ended.
__device__ __forceinline__ void let_next_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/// In the later kernel: waits until the earlier ones have ended, and what they wrote is there. All
/// threads call it, before they touch the GPU's memory: kernels behind this one rely on that.
__device__ __forceinline__ void wait_for_earlier() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

/// What stands between a launch's angle brackets.
struct LaunchShape {
  dim3 blocks;
  dim3 threads;
  size_t shared_bytes = 0;
};

/// Launches a kernel, which must call wait_for_earlier. Throws as check().
template <typename... Params, typename... Args>
void launch_early(void (*kernel)(Params...), const LaunchShape& shape, cudaStream_t stream,
                  const Args&... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = shape.blocks;
  config.blockDim = shape.threads;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, args...));
}

}  // namespace tessera::cuda
