#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/dtype.h"

namespace tessera::cuda {

/// rounded[i] = x[i] as BF16.
void launch_round_to_bf16(const float* x, int64_t count, void* rounded, cudaStream_t stream);

/// sum[i] = Σ_p part p's value i in F32 in their order; part `own` is at `own_part`, F32 or BF16 as
/// the sum is, and rounded to BF16 like the others, which lie one after the other at `others`, BF16
/// [num_parts - 1, count]. sum may be own_part.
struct Bf16PartsSum {
  const void* others;
  DType dtype;  ///< of own_part and sum
  const void* own_part;
  void* sum;
  int64_t count;
  int own;
  int num_parts;
};
void launch_sum_bf16_parts(const Bf16PartsSum& call, cudaStream_t stream);

/// sum[i] = sum[i] + x[i] in F32, or x[i] where it sets, rounded to BF16.
struct Bf16Addition {
  const float* x;
  void* sum;
  int64_t count;
  bool sets;
};
void launch_add_to_bf16(const Bf16Addition& call, cudaStream_t stream);

}  // namespace tessera::cuda
