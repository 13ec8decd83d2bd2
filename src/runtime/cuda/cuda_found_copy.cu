#include <algorithm>
#include <cstdint>

#include "ops/cuda/dependent_launch.cuh"
#include "runtime/cuda/cuda_found_copy.h"

namespace tessera::cuda {
namespace {

constexpr unsigned kThreads = 256;
/// The bus takes time to answer: many words are asked for at once.
constexpr int64_t kMostBlocks = 64;
constexpr int64_t kWord = sizeof(uint4);

__device__ __forceinline__ bool is_aligned(const void* to, const void* from) {
  return (reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % kWord == 0;
}

/// What the host wrote is read past the caches, which may have it as it was.
__global__ void __launch_bounds__(kThreads)
    copy_found(unsigned char* to, const unsigned char* const* from, int64_t num_bytes) {
  wait_for_earlier();
  const auto* const source = reinterpret_cast<const unsigned char*>(
      __ldcv(reinterpret_cast<const unsigned long long*>(from)));
  const int64_t words = is_aligned(to, source) ? num_bytes / kWord : 0;
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = first; i < words; i += step)
    reinterpret_cast<uint4*>(to)[i] = __ldcv(reinterpret_cast<const uint4*>(source) + i);
  for (int64_t i = words * kWord + first; i < num_bytes; i += step) to[i] = __ldcv(source + i);
}

}  // namespace

void launch_found_copy(void* to, const void* const* from, int64_t num_bytes, cudaStream_t stream) {
  const int64_t words = (num_bytes + kWord - 1) / kWord;
  const int64_t blocks = std::min((words + kThreads - 1) / kThreads, kMostBlocks);
  launch_early(copy_found, {dim3(static_cast<unsigned>(blocks)), dim3(kThreads)}, stream,
               static_cast<unsigned char*>(to), reinterpret_cast<const unsigned char* const*>(from),
               num_bytes);
}

}  // namespace tessera::cuda
