#include <algorithm>
#include <cstdint>

#include "ops/cuda/dependent_launch.cuh"
#include "runtime/cuda/cuda_found_copy.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 1024;
/// That a thread asks for at once, since the bus takes time to answer.
constexpr int kLoads = 4;
/// Few: each reads the address, which the bus gives to one after the other, a microsecond each.
constexpr int64_t kMostBlocks = 8;
constexpr int64_t kWord = sizeof(uint4);

__device__ __forceinline__ bool is_aligned(const void* to, const void* from) {
  return (reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % kWord == 0;
}

__device__ __forceinline__ const unsigned char* find(const unsigned char* const* from) {
  __shared__ const unsigned char* found;
  if (threadIdx.x == 0) {
    found = reinterpret_cast<const unsigned char*>(
        __ldcv(reinterpret_cast<const unsigned long long*>(from)));
  }
  __syncthreads();
  return found;
}

/// What the host wrote is read past the caches, which may have it as it was.
__global__ void __launch_bounds__(kThreads)
    copy_found(unsigned char* to, const unsigned char* const* from, int64_t num_bytes) {
  wait_for_earlier();
  const unsigned char* const source = find(from);
  const int64_t words = is_aligned(to, source) ? num_bytes / kWord : 0;
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = first; i < words; i += kLoads * step) {
    uint4 loaded[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      if (i + k * step < words)
        loaded[k] = __ldcv(reinterpret_cast<const uint4*>(source) + i + k * step);
    }
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      if (i + k * step < words) reinterpret_cast<uint4*>(to)[i + k * step] = loaded[k];
    }
  }
  for (int64_t i = words * kWord + first; i < num_bytes; i += step) to[i] = __ldcv(source + i);
}

}  // namespace

void launch_found_copy(void* to, const void* const* from, int64_t num_bytes, cudaStream_t stream) {
  constexpr int64_t kBlockBytes = int64_t{kThreads} * kLoads * kWord;
  const int64_t blocks = std::min((num_bytes + kBlockBytes - 1) / kBlockBytes, kMostBlocks);
  launch_early(copy_found, {dim3(static_cast<unsigned>(blocks)), dim3(kThreads)}, stream,
               static_cast<unsigned char*>(to), reinterpret_cast<const unsigned char* const*>(from),
               num_bytes);
}

}  // namespace tessera::cuda
