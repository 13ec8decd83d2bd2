#pragma once

#include <cuda_bf16.h>

#include <type_traits>

#include "ops/adamw/adamw_factors.h"
#include "ops/adamw/state_rounding.h"

/// What AdamW's kernels for moments with and without scales share.
namespace tessera::cuda {

/// Whether a BF16 weight and this make a master.
template <typename Master>
constexpr bool kIsRemainder = std::is_same_v<Master, uint16_t> || std::is_same_v<Master, uint8_t>;

/// The number that an update starts from.
template <typename Master>
__device__ __forceinline__ float master_of(Master master, __nv_bfloat16 weight) {
  if constexpr (kIsRemainder<Master>) {
    return __uint_as_float(join_halves(__bfloat16_as_ushort(weight), lower_half(master)));
  } else {
    return static_cast<float>(master);
  }
}

/// What is kept of a master, which becomes what that and a weight tell.
template <typename Master>
__device__ __forceinline__ Master keep_master(float& master, uint32_t random) {
  if constexpr (kIsRemainder<Master>) {
    const uint32_t word = word_with_remainder<Master>(__float_as_uint(master), weight_bits(random));
    master = __uint_as_float(word);
    return remainder_of<Master>(word);
  } else if constexpr (std::is_same_v<Master, float>) {
    return master;
  } else {
    return __ushort_as_bfloat16(round_stochastically(__float_as_uint(master), weight_bits(random)));
  }
}

/// Each rounding is written out: the compiler would join products and sums otherwise in each
/// kernel, and a parameter's bits would depend on how ranks and launches cut it.
__device__ __forceinline__ void update_element(float grad, float grad_scale, const AdamWFactors& f,
                                               float& master, float& m, float& v) {
  const float g = __fmul_rn(grad, grad_scale);
  m = __fmaf_rn(__fmaf_rn(grad, grad_scale, -m), f.new_m, m);
  v = __fmaf_rn(g, __fmul_rn(f.new_v, g), __fmul_rn(v, f.old_v));
  const float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), f.sqrt_bias2), f.eps);
  const float change = __fmul_rn(f.step_size, __fdiv_rn(m, denominator));
  master = __fmaf_rn(master, f.decay, -change);
}

}  // namespace tessera::cuda
