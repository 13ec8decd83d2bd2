// What turns the router's products of BF16 x into products of BF16 matrices. An F32 operand is
// split into BF16 terms, each the rounded rest of those before: three hold all 24 bits. Products of
// BF16 values are exact in F32, where they are added up. Terms whose product is below what the
// result keeps are left out.
#include <cuda_bf16.h>

#include "ops/cuda/check.h"
#include "ops/router/router_kernels.h"

namespace tessera::cuda {
namespace {

using Value = __nv_bfloat16;

constexpr int kThreads = 256;

struct Terms {
  Value of[3];
};

/// The rest of a value that is not finite is none.
__device__ __forceinline__ Terms split(float rest) {
  Terms terms;
#pragma unroll
  for (Value& term : terms.of) {
    term = __float2bfloat16_rn(rest);
    const auto value = static_cast<float>(term);
    rest = isfinite(value) ? rest - value : 0.0F;
  }
  return terms;
}

__global__ void __launch_bounds__(kThreads)
    split_weight(const float* weight_EH, int64_t count, bool third, Value* terms_3EH) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const Terms terms = split(weight_EH[i]);
  terms_3EH[i] = terms.of[0];
  terms_3EH[count + i] = terms.of[1];
  terms_3EH[2 * count + i] = third ? terms.of[2] : terms.of[0];
}

__global__ void __launch_bounds__(kThreads)
    split_grad(const float* grad_TE, int64_t count, int num_experts, Value* terms_T4E) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const Terms terms = split(grad_TE[i]);
  Value* row = terms_T4E + i / num_experts * (4 * num_experts) + i % num_experts;
  row[0] = terms.of[0];
#pragma unroll
  for (int term = 0; term < 3; ++term) row[(term + 1) * num_experts] = terms.of[term];
}

/// The smallest first.
__global__ void __launch_bounds__(kThreads)
    add_terms(const float* products_T3E, int64_t count, int num_experts, float* logits_TE) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const float* row = products_T3E + i / num_experts * (3 * num_experts) + i % num_experts;
  logits_TE[i] = row[2 * num_experts] + row[num_experts] + row[0];
}

unsigned blocks_of(int64_t count) {
  return static_cast<unsigned>((count + kThreads - 1) / kThreads);
}

}  // namespace

bool can_split_router(const RouterShape& s) {
  return s.bf16 && s.hidden_size % 8 == 0 && s.num_experts % 8 == 0;
}

void launch_split_weight(const RouterShape& s, const float* weight_EH, RouterTerms which,
                         void* terms_3EH, cudaStream_t stream) {
  const int64_t count = s.num_experts * s.hidden_size;
  if (count == 0) return;
  split_weight<<<blocks_of(count), kThreads, 0, stream>>>(
      weight_EH, count, which == RouterTerms::kThree, static_cast<Value*>(terms_3EH));
}

void launch_split_grad(const RouterShape& s, const float* grad_logits_TE, void* terms_T4E,
                       cudaStream_t stream) {
  const int64_t count = s.num_tokens * s.num_experts;
  if (count == 0) return;
  split_grad<<<blocks_of(count), kThreads, 0, stream>>>(
      grad_logits_TE, count, static_cast<int>(s.num_experts), static_cast<Value*>(terms_T4E));
}

void launch_add_terms(const RouterShape& s, const float* products_T3E, float* logits_TE,
                      cudaStream_t stream) {
  const int64_t count = s.num_tokens * s.num_experts;
  if (count == 0) return;
  add_terms<<<blocks_of(count), kThreads, 0, stream>>>(products_T3E, count,
                                                       static_cast<int>(s.num_experts), logits_TE);
}

}  // namespace tessera::cuda
