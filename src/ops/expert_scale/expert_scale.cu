#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/expert_scale/expert_scale_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;

// A thread has a choice; of the probabilities and of their gradients alike.
__global__ void __launch_bounds__(kThreads)
    scale_choices(const __grid_constant__ ExpertChoices call, const float* from, float* to) {
  wait_for_earlier();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= call.count) return;
  const int32_t expert = call.expert_idx[i];
  to[i] = expert < 0 ? from[i] : from[i] * call.scale[expert];
}

// A block has an expert and goes over all choices, in an order that their number alone gives.
__global__ void __launch_bounds__(kThreads)
    sum_by_expert(const __grid_constant__ ExpertChoices call, const float* grad,
                  float* grad_scale) {
  wait_for_earlier();
  __shared__ float of_warps[kThreads / 32];
  const auto expert = static_cast<int32_t>(blockIdx.x);
  float sum = 0;
  for (int64_t i = threadIdx.x; i < call.count; i += kThreads) {
    if (call.expert_idx[i] == expert) sum += grad[i] * call.probs[i];
  }
  sum = sum_lanes(sum);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  float total = 0;
  for (const float part : of_warps) total += part;
  grad_scale[expert] += total;
}

void launch_scaled(const ExpertChoices& call, const float* from, float* to, cudaStream_t stream) {
  if (call.count == 0) return;
  const auto blocks = static_cast<unsigned>(divide_up(call.count, kThreads));
  launch_early(scale_choices, {blocks, kThreads}, stream, call, from, to);
}

}  // namespace

void launch_expert_scale(const ExpertChoices& call, float* scaled, cudaStream_t stream) {
  launch_scaled(call, call.probs, scaled, stream);
}

void launch_expert_scale_backward(const ExpertChoices& call, const float* grad, float* grad_probs,
                                  float* grad_scale, cudaStream_t stream) {
  launch_scaled(call, grad, grad_probs, stream);
  if (call.count == 0 || grad_scale == nullptr) return;
  launch_early(sum_by_expert, {static_cast<unsigned>(call.num_experts), kThreads}, stream, call,
               grad, grad_scale);
}

}  // namespace tessera::cuda
