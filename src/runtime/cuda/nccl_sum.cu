#include <cuda_bf16.h>

#include <algorithm>

#include "ops/cuda/dependent_launch.cuh"
#include "runtime/cuda/nccl_sum.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 1024;

__global__ void __launch_bounds__(kThreads) sum_parts(const Bf16Sum s) {
  wait_for_earlier();
  const auto* const own_part = static_cast<const __nv_bfloat16*>(s.own_part);
  const auto* const others = static_cast<const __nv_bfloat16*>(s.others);
  auto* const out = static_cast<__nv_bfloat16*>(s.out);
  const int64_t step = int64_t{kThreads} * gridDim.x;
  for (int64_t i = int64_t{kThreads} * blockIdx.x + threadIdx.x; i < s.count; i += step) {
    float sum = 0;
    for (int p = 0; p < s.num_parts; ++p) {
      const int64_t before = p < s.own ? p : p - 1;
      sum += __bfloat162float(p == s.own ? own_part[i] : others[before * s.count + i]);
    }
    out[i] = __float2bfloat16_rn(sum);
  }
}

}  // namespace

void launch_bf16_sum(const Bf16Sum& sum, cudaStream_t stream) {
  if (sum.count == 0) return;
  const int64_t blocks = std::min((sum.count + kThreads - 1) / kThreads, kMaxBlocks);
  launch_early(sum_parts, {static_cast<unsigned>(blocks), kThreads}, stream, sum);
}

}  // namespace tessera::cuda
