#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tessera {

/// Sums of F32 values that travel as BF16 (MegaScale-MoE, section 5, figure 11): every summand is
/// rounded once, and the sum is made in F32 where it is wanted. Memory is given as bytes, since F32
/// and BF16 values take turns in it.

/// Rounds `count` F32 values to BF16. `to` may begin at `from`, or before it.
void round_to_bf16(const std::byte* from, int64_t count, std::byte* to);

/// Rounds F32 values to values that BF16 can hold.
void round_as_bf16(const std::byte* from, std::span<float> to);

/// sum[j] = Σ over p of part p's value j, in F32 in the order of the parts. `parts` holds all parts
/// but part `own`, as BF16 [num_parts - 1, sum.size()]; part `own` is what `sum` holds before.
void sum_bf16_parts(const std::byte* parts, int64_t num_parts, int64_t own, std::span<float> sum);

}  // namespace tessera
