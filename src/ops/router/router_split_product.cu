// What turns the router's products of BF16 x into products of BF16 matrices: the weight's terms.
// Products of BF16 values are exact in F32, where they are added up. Terms whose product is below
// what the result keeps are left out.
#include "ops/cuda/dependent_launch.cuh"
#include "ops/router/router_kernels.h"
#include "ops/router/router_terms.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    split_weight(const float* weight_EH, int64_t count, bool third, __nv_bfloat16* terms_3EH) {
  wait_for_earlier();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const RouterTermValues terms = split_into_terms(weight_EH[i]);
  terms_3EH[i] = terms.of[0];
  terms_3EH[count + i] = terms.of[1];
  terms_3EH[2 * count + i] = third ? terms.of[2] : terms.of[0];
}

unsigned blocks_of(int64_t count) {
  return static_cast<unsigned>((count + kThreads - 1) / kThreads);
}

}  // namespace

bool has_tensor_logits(const RouterShape& s) {
  return is_low_precision(s.dtype) && s.hidden_size > 0 && s.hidden_size % 8 == 0;
}

bool can_split_router(const RouterShape& s) {
  return is_low_precision(s.dtype) && s.hidden_size % 8 == 0 && s.num_experts % 8 == 0;
}

void launch_split_weight(const RouterShape& s, const float* weight_EH, RouterTerms which,
                         void* terms_3EH, cudaStream_t stream) {
  const int64_t count = s.num_experts * s.hidden_size;
  if (count == 0) return;
  launch_early(split_weight, {blocks_of(count), kThreads}, stream, weight_EH, count,
               which == RouterTerms::kThree, static_cast<__nv_bfloat16*>(terms_3EH));
}

}  // namespace tessera::cuda
