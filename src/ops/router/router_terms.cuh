#pragma once

#include <cuda_bf16.h>

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

}  // namespace tessera::cuda
