#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tessera::cuda {

/// out[i] = Σ_p parts[p][i] in F32 in their order, rounded once, all BF16 [count]; part `own` is at
/// `own_part`, the others one after the other at `others`, in their order. out may be own_part.
struct Bf16Sum {
  const void* own_part;
  const void* others;
  void* out;
  int64_t count;
  int own;
  int num_parts;
};
void launch_bf16_sum(const Bf16Sum& sum, cudaStream_t stream);

}  // namespace tessera::cuda
