#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/noise.h"
#include "ops/sparse_mixer/sparse_mixer_kernels.h"

// A thread has a token.
namespace tessera::cuda {
namespace {

constexpr int kThreads = 128;

__device__ __forceinline__ int64_t own_token() {
  return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

__global__ void __launch_bounds__(kThreads)
    mix_tokens(const __grid_constant__ SparseMixerTokens call, float* probs) {
  wait_for_earlier();
  const int64_t token = own_token();
  if (token >= call.tokens) return;
  const int64_t at = token * call.rule.top_k;
  call.rule.find_probs(call.logits + token * call.rule.num_experts, call.expert_idx + at,
                       probs + at);
}

__global__ void __launch_bounds__(kThreads) clear_counts(float* counts_E, int num_experts) {
  wait_for_earlier();
  for (int e = threadIdx.x; e < num_experts; e += kThreads) counts_E[e] = 0;
}

// Counts are whole numbers, so that their order does not matter.
__global__ void __launch_bounds__(kThreads)
    draw_tokens(const __grid_constant__ SparseMixerTokens call,
                const __grid_constant__ SparseMixerDraw draw) {
  wait_for_earlier();
  const int64_t token = own_token();
  if (token >= call.tokens) return;
  const int top_k = call.rule.top_k;
  const float* const logits = call.logits + token * call.rule.num_experts;
  const int32_t* const given = call.expert_idx + token * top_k;
  int32_t* const drawn = draw.drawn_idx + token * top_k;
  float* const probs = draw.probs + token * top_k;
  if (draw.noise[kNoiseTraining] == 0 || given[0] < 0) {
    for (int k = 0; k < top_k; ++k) drawn[k] = given[k];
    call.rule.find_probs(logits, drawn, probs);
  } else {
    call.rule.draw(logits,
                   {.key_low = static_cast<uint32_t>(draw.noise[kNoiseKeyLow]),
                    .key_high = static_cast<uint32_t>(draw.noise[kNoiseKeyHigh]),
                    .token = draw.token_numbers[token]},
                   drawn, probs);
  }
  for (int k = 0; k < top_k; ++k) {
    if (drawn[k] >= 0) atomicAdd(&draw.counts_E[drawn[k]], 1.0F);
  }
}

__global__ void __launch_bounds__(kThreads)
    mix_tokens_backward(const __grid_constant__ SparseMixerTokens call, const float* grad,
                        float* grad_logits) {
  wait_for_earlier();
  const int64_t token = own_token();
  if (token >= call.tokens) return;
  const int64_t row = token * call.rule.num_experts;
  const int64_t at = token * call.rule.top_k;
  call.rule.gradient(call.logits + row, call.expert_idx + at, grad + at, grad_logits + row);
}

LaunchShape shape_of(const SparseMixerTokens& call) {
  return {static_cast<unsigned>(divide_up(call.tokens, kThreads)), kThreads};
}

}  // namespace

void launch_sparse_mixer(const SparseMixerTokens& call, float* probs, cudaStream_t stream) {
  if (call.tokens == 0) return;
  launch_early(mix_tokens, shape_of(call), stream, call, probs);
}

void launch_sparse_mixer_draw(const SparseMixerTokens& call, const SparseMixerDraw& draw,
                              cudaStream_t stream) {
  launch_early(clear_counts, {1, kThreads}, stream, draw.counts_E, call.rule.num_experts);
  if (call.tokens == 0) return;
  launch_early(draw_tokens, shape_of(call), stream, call, draw);
}

void launch_sparse_mixer_backward(const SparseMixerTokens& call, const float* grad,
                                  float* grad_logits, cudaStream_t stream) {
  if (call.tokens == 0) return;
  launch_early(mix_tokens_backward, shape_of(call), stream, call, grad, grad_logits);
}

}  // namespace tessera::cuda
