#pragma once

#include <cuda_bf16.h>

#include "ops/cuda/ptx/barrier.cuh"

/// Products of BF16 by a warp alone, from its registers (mma.sync), and their operands from shared
/// memory (ldmatrix). Addresses of lines are multiples of 16 bytes.
namespace tessera::cuda {

/// sums [16, 8] += a [16, 16] times b [16, 8].
__device__ __forceinline__ void fragment_product(float (&sums)[4], const uint32_t (&a)[4],
                                                 uint32_t b_first, uint32_t b_second) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_first), "r"(b_second));
}

/// Four 8 by 8 parts, their lines' addresses given by eight lanes each; transposed or as they are.
template <bool kTransposed>
__device__ __forceinline__ void load_fragment(uint32_t (&to)[4], const __nv_bfloat16* line) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(line)));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(line)));
  }
}

/// a [16, 16], its lines of `stride` values along the reduction.
__device__ __forceinline__ void load_fragment_rows(uint32_t (&a)[4], const __nv_bfloat16* from,
                                                   int stride) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  load_fragment<false>(a, from + (lane % 16) * stride + lane / 16 * 8);
}

/// b [16, 16], its lines along the reduction: one line a column. Of the first eight columns b[0]
/// and b[1], of the others b[2] and b[3].
__device__ __forceinline__ void load_fragment_columns(uint32_t (&b)[4], const __nv_bfloat16* from,
                                                      int stride) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  load_fragment<false>(b, from + (lane / 16 * 8 + lane % 8) * stride + lane / 8 % 2 * 8);
}

/// The same where the lines are across the reduction.
__device__ __forceinline__ void load_fragment_columns_across(uint32_t (&b)[4],
                                                             const __nv_bfloat16* from,
                                                             int stride) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  load_fragment<true>(b, from + (lane % 16) * stride + lane / 16 * 8);
}

}  // namespace tessera::cuda
