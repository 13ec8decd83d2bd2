#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tessera::cuda {

/// rounded[i] = x[i] as BF16.
void launch_round_to_bf16(const float* x, int64_t count, void* rounded, cudaStream_t stream);

/// sum[i] = Σ_p part p's value i in F32 in their order; part `own` is at `own_part`, rounded to
/// BF16 like the others, which lie one after the other at `others`, BF16 [num_parts - 1, count].
/// sum may be own_part.
struct Bf16PartsSum {
  const void* others;
  const float* own_part;
  float* sum;
  int64_t count;
  int own;
  int num_parts;
};
void launch_sum_bf16_parts(const Bf16PartsSum& call, cudaStream_t stream);

}  // namespace tessera::cuda
