#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/zero_experts/zero_experts_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kWarps = 8;

/// What a warp needs of its token's choices.
struct TokenChoices {
  int64_t first;
  float weight;

  __device__ __forceinline__ TokenChoices(const ZeroExpertRows& call, int64_t token)
      : first(token * call.top_k), weight(0) {
    for (int k = 0; k < call.top_k; ++k)
      weight += call.expert_idx[first + k] >= call.num_experts ? call.probs[first + k] : 0.0F;
  }
};

__device__ __forceinline__ int64_t own_token() {
  return static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
}

// A warp has a token.
template <typename T, int kWidth>
__global__ void __launch_bounds__(32 * kWarps)
    weigh_tokens(const __grid_constant__ ZeroExpertRows call, T* y, int32_t* routed_idx) {
  wait_for_earlier();
  const int64_t token = own_token();
  if (token >= call.tokens) return;
  const int lane = threadIdx.x % 32;
  const TokenChoices choices(call, token);
  for (int k = lane; k < call.top_k; k += 32) {
    const int32_t expert = call.expert_idx[choices.first + k];
    routed_idx[choices.first + k] = expert < call.num_experts ? expert : -1;
  }
  const T* const x = static_cast<const T*>(call.x) + token * call.width;
  for (int64_t i = lane * kWidth; i < call.width; i += 32 * kWidth) {
    Floats<kWidth> values = load<kWidth>(x + i);
#pragma unroll
    for (int v = 0; v < kWidth; ++v) values[v] *= choices.weight;
    store(y + token * call.width + i, values);
  }
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(32 * kWarps)
    weigh_tokens_backward(const __grid_constant__ ZeroExpertRows call, const T* grad, T* grad_x,
                          float* grad_probs) {
  wait_for_earlier();
  const int64_t token = own_token();
  if (token >= call.tokens) return;
  const int lane = threadIdx.x % 32;
  const TokenChoices choices(call, token);
  const int64_t row = token * call.width;
  const T* const x = static_cast<const T*>(call.x) + row;
  float dot = 0;
  for (int64_t i = lane * kWidth; i < call.width; i += 32 * kWidth) {
    const Floats<kWidth> values = load<kWidth>(x + i);
    Floats<kWidth> grads = load<kWidth>(grad + row + i);
#pragma unroll
    for (int v = 0; v < kWidth; ++v) {
      dot += grads[v] * values[v];
      grads[v] *= choices.weight;
    }
    store(grad_x + row + i, grads);
  }
  dot = sum_lanes(dot);
  for (int k = lane; k < call.top_k; k += 32)
    grad_probs[choices.first + k] =
        call.expert_idx[choices.first + k] >= call.num_experts ? dot : 0.0F;
}

LaunchShape shape_of(const ZeroExpertRows& call) {
  return {static_cast<unsigned>(divide_up(call.tokens, kWarps)), 32 * kWarps};
}

}  // namespace

void launch_zero_experts(const ZeroExpertRows& call, void* y, int32_t* routed_idx,
                         cudaStream_t stream) {
  if (call.tokens == 0) return;
  const bool vectors = are_whole_vectors(call.dtype, call.width) && are_aligned(call.x, y);
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    launch_early(weigh_tokens<T, kWidth>, shape_of(call), stream, call, static_cast<T*>(y),
                 routed_idx);
  });
}

void launch_zero_experts_backward(const ZeroExpertRows& call, const void* grad, void* grad_x,
                                  float* grad_probs, cudaStream_t stream) {
  if (call.tokens == 0) return;
  const bool vectors =
      are_whole_vectors(call.dtype, call.width) && are_aligned(call.x, grad, grad_x);
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    launch_early(weigh_tokens_backward<T, kWidth>, shape_of(call), stream, call,
                 static_cast<const T*>(grad), static_cast<T*>(grad_x), grad_probs);
  });
}

}  // namespace tessera::cuda
