#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/router/router_kernels.h"

/// The two ways in which the router's products are made: exactly in F32 on the ordinary cores, for
/// any shape, and from BF16 terms on the tensor cores, for BF16 x whose sizes allow it.
namespace tessera::cuda {

constexpr int router_tile_columns(int64_t num_columns) {
  return num_columns <= 16 ? 16 : num_columns <= 64 ? 64 : 128;
}

/// Whether the tensor cores can make the products of this x.
bool can_split_router(const RouterShape& shape, const void* x);

/// logits_TE = x · weightᵀ; `terms` is BF16 [3, E, H].
void split_router_logits(const RouterShape& shape, const void* x, const float* weight, void* terms,
                         float* logits_TE, cudaStream_t stream);
/// grad_terms BF16 [3, T, E], what the next two take.
void split_grad_logits(const RouterShape& shape, const float* grad_logits_TE, void* grad_terms,
                       cudaStream_t stream);
/// grad_x = grad_logits · weight + addend (null: zero), from grad_terms; weight_terms is BF16
/// [2, E, H].
void split_router_grad_x(const RouterProductGrads& grads, cudaStream_t stream);
/// partials [splits, E, H] = grad_logitsᵀ · x over each `split_tokens` tokens.
void split_router_grad_weight(const RouterShape& shape, const void* grad_terms, const void* x,
                              float* partials, int64_t split_tokens, cudaStream_t stream);

}  // namespace tessera::cuda
