// What turns the router's products of BF16 x into products of BF16 matrices: the weight's terms.
// Products of BF16 values are exact in F32, where they are added up. Terms whose product is below
// what the result keeps are left out.
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/short_kernel.cuh"
#include "ops/router/router_terms.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) split_weight(const RouterWeight weight) {
  wait_for_earlier();
  let_next_begin_if_short();
  write_weight_terms(weight, static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x);
}

unsigned blocks_of(int64_t count) {
  return static_cast<unsigned>((count + kThreads - 1) / kThreads);
}

}  // namespace

bool has_tensor_logits(const RouterShape& s) {
  return is_low_precision(s.dtype) && s.hidden_size > 0 && s.hidden_size % 8 == 0;
}

bool is_router_one_block(const RouterShape& s) {
  return has_tensor_logits(s) && s.num_tokens > 0 && s.num_tokens <= kRouterBlockTokens &&
         s.num_experts <= kRouterOneBlockExperts;
}

bool can_split_router(const RouterShape& s) {
  return is_low_precision(s.dtype) && s.hidden_size % 8 == 0 && s.num_experts % 8 == 0;
}

void launch_split_weight(const RouterWeight& weight, cudaStream_t stream) {
  if (weight.count == 0) return;
  launch_early(split_weight, {blocks_of(weight.count), kThreads}, stream, weight);
}

}  // namespace tessera::cuda
