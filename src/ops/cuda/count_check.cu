#include "ops/cuda/count_check.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/fail.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    count_check_kernel(const int64_t* counts, const int64_t* used, int64_t size) {
  wait_for_earlier();
  for (int64_t i = threadIdx.x; i < size; i += kThreads) {
    if (counts[i] != used[i]) fail("an exchange was started with other counts than", counts[i]);
  }
}

}  // namespace

void launch_count_check(const int64_t* counts, const int64_t* used, int64_t size,
                        cudaStream_t stream) {
  launch_early(count_check_kernel, {1, kThreads}, stream, counts, used, size);
}

}  // namespace tessera::cuda
