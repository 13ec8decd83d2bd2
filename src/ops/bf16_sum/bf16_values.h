#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/dtype.h"

namespace tessera {

/// The arithmetic of bf16_sum.h on the host. Memory is given as bytes, since F32 and BF16 values
/// take turns in it.

/// Rounds `count` F32 values to BF16. `to` may begin at `from`, or before it.
void round_to_bf16(const std::byte* from, int64_t count, std::byte* to);

/// sum[j] = Σ over p of part p's value j, in F32 in the order of the parts. `parts` holds all parts
/// but part `own`, as BF16 [num_parts - 1, sum.size()]; part `own` is what `sum` holds before,
/// rounded to BF16. A sum in BF16 is rounded in the end.
void sum_bf16_parts(const std::byte* parts, int64_t num_parts, int64_t own, std::span<float> sum);
void sum_bf16_parts(const std::byte* parts, int64_t num_parts, int64_t own, std::span<Bf16> sum);

}  // namespace tessera
