#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/top_p/top_p_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ int64_t own_token() {
  return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

__global__ void __launch_bounds__(kThreads) clear_counts(float* counts_E, int num_experts) {
  wait_for_earlier();
  for (int e = threadIdx.x; e < num_experts; e += kThreads) counts_E[e] = 0;
}

// A thread has a token. Counts are whole numbers, so that their order does not matter.
__global__ void __launch_bounds__(kThreads)
    keep_top(const __grid_constant__ TopPTokens call, float* kept_probs, int32_t* kept_idx,
             float* counts_E) {
  wait_for_earlier();
  const int64_t token = own_token();
  if (token >= call.tokens) return;
  const int64_t at = token * call.rule.top_k;
  const int count =
      call.rule.keep(call.probs + at, call.expert_idx + at, kept_probs + at, kept_idx + at);
  for (int k = 0; k < count; ++k) {
    if (kept_idx[at + k] >= 0) atomicAdd(&counts_E[kept_idx[at + k]], 1.0F);
  }
}

__global__ void __launch_bounds__(kThreads)
    keep_top_backward(const __grid_constant__ TopPTokens call, const float* grad,
                      float* grad_probs) {
  wait_for_earlier();
  const int64_t token = own_token();
  if (token >= call.tokens) return;
  const int64_t at = token * call.rule.top_k;
  call.rule.gradient(call.probs + at, call.expert_idx + at, grad + at, grad_probs + at);
}

LaunchShape shape_of(const TopPTokens& call) {
  return {static_cast<unsigned>(divide_up(call.tokens, kThreads)), kThreads};
}

}  // namespace

void launch_top_p(const TopPTokens& call, float* kept_probs, int32_t* kept_idx, float* counts_E,
                  cudaStream_t stream) {
  launch_early(clear_counts, {1, kThreads}, stream, counts_E, call.num_experts);
  if (call.tokens == 0) return;
  launch_early(keep_top, shape_of(call), stream, call, kept_probs, kept_idx, counts_E);
}

void launch_top_p_backward(const TopPTokens& call, const float* grad, float* grad_probs,
                           cudaStream_t stream) {
  if (call.tokens == 0) return;
  launch_early(keep_top_backward, shape_of(call), stream, call, grad, grad_probs);
}

}  // namespace tessera::cuda
