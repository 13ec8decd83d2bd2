#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/fail.cuh"
#include "ops/hash_experts/hash_experts_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;

/// A thread has a choice of a token.
__global__ void __launch_bounds__(kThreads) look_up(const __grid_constant__ HashLookup p) {
  wait_for_earlier();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.num_tokens * p.top_k) return;
  const int32_t token = p.tokens[i / p.top_k];
  if (token < 0 || token >= p.vocab_size) fail("hash_experts: no such token id", token);
  const float number = p.table[token * p.top_k + i % p.top_k];
  const auto expert = static_cast<int32_t>(number);
  if (expert < 0 || expert >= p.num_experts || static_cast<float>(expert) != number)
    fail("hash_experts: no such expert", expert);
  p.expert_idx[i] = expert;
}

}  // namespace

void launch_hash_experts(const HashLookup& lookup, cudaStream_t stream) {
  const int64_t count = lookup.num_tokens * lookup.top_k;
  if (count == 0) return;
  const auto blocks = static_cast<unsigned>((count + kThreads - 1) / kThreads);
  launch_early(look_up, {blocks, kThreads}, stream, lookup);
}

}  // namespace tessera::cuda
