#include <cuda_bf16.h>

#include <algorithm>

#include "ops/bf16_sum/bf16_sum_kernels.h"
#include "ops/cuda/dependent_launch.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 1024;

unsigned blocks_for(int64_t count) {
  return static_cast<unsigned>(std::min((count + kThreads - 1) / kThreads, kMaxBlocks));
}

__device__ int64_t first_index() {
  return int64_t{kThreads} * blockIdx.x + threadIdx.x;
}
__device__ int64_t index_step() {
  return int64_t{kThreads} * gridDim.x;
}

__global__ void __launch_bounds__(kThreads)
    round_values(const float* x, int64_t count, __nv_bfloat16* rounded) {
  wait_for_earlier();
  for (int64_t i = first_index(); i < count; i += index_step())
    rounded[i] = __float2bfloat16_rn(x[i]);
}

__global__ void __launch_bounds__(kThreads) sum_parts(const Bf16PartsSum s) {
  wait_for_earlier();
  const auto* const others = static_cast<const __nv_bfloat16*>(s.others);
  for (int64_t i = first_index(); i < s.count; i += index_step()) {
    const float own = __bfloat162float(__float2bfloat16_rn(s.own_part[i]));
    float sum = 0;
    for (int p = 0; p < s.num_parts; ++p) {
      const int64_t before = p < s.own ? p : p - 1;
      sum += p == s.own ? own : __bfloat162float(others[before * s.count + i]);
    }
    s.sum[i] = sum;
  }
}

}  // namespace

void launch_round_to_bf16(const float* x, int64_t count, void* rounded, cudaStream_t stream) {
  if (count == 0) return;
  launch_early(round_values, {blocks_for(count), kThreads}, stream, x, count,
               static_cast<__nv_bfloat16*>(rounded));
}

void launch_sum_bf16_parts(const Bf16PartsSum& call, cudaStream_t stream) {
  if (call.count == 0) return;
  launch_early(sum_parts, {blocks_for(call.count), kThreads}, stream, call);
}

}  // namespace tessera::cuda
