#pragma once

#include <cuda_bf16.h>

#include "ops/router/router_kernels.h"

namespace tessera::cuda {

/// An F32 value as BF16 terms, each the rounded rest of those before: three hold all 24 bits.
struct RouterTermValues {
  __nv_bfloat16 of[3];
};

/// The rest of a value that is not finite is none.
__device__ __forceinline__ RouterTermValues split_into_terms(float rest) {
  RouterTermValues terms;
#pragma unroll
  for (__nv_bfloat16& term : terms.of) {
    term = __float2bfloat16_rn(rest);
    const auto value = static_cast<float>(term);
    rest = isfinite(value) ? rest - value : 0.0F;
  }
  return terms;
}

/// Those of the weight's i-th value.
__device__ __forceinline__ void write_weight_terms(const RouterWeight& weight, int64_t i,
                                                   float value) {
  const RouterTermValues terms = split_into_terms(value);
  auto* const to = static_cast<__nv_bfloat16*>(weight.terms_3EH);
  to[i] = terms.of[0];
  to[weight.count + i] = terms.of[1];
  to[2 * weight.count + i] = weight.which == RouterTerms::kThree ? terms.of[2] : terms.of[0];
}
/// Of the i-th value, if there are as many.
__device__ __forceinline__ void write_weight_terms(const RouterWeight& weight, int64_t i) {
  if (i < weight.count) write_weight_terms(weight, i, weight.values_EH[i]);
}

}  // namespace tessera::cuda
