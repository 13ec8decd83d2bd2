#pragma once

#include <algorithm>

#include "ops/cuda/row_args.h"
#include "ops/rope/rope.h"
#include "ops/rope/rope_kernels.h"

namespace tessera::cuda {

static_assert(Rope::kMaxRotaryDim == 2 * kMaxRopePairs);

/// The rotation of `from` into `to`, both rows as those of x.
template <typename Op>
RopeRows rope_rows(const RotarySpec& spec, const Args<Op>& args, bool inverse, const void* from,
                   void* to) {
  const Tensor& x = args.in(Op::kX);
  RopeRows rope = {.dtype = x.dtype,
                   .rows = rows_of(args, Op::kX, x.shape[1]),
                   .num_heads = static_cast<int>(spec.num_heads),
                   .head_size = static_cast<int>(spec.head_size),
                   .offset = static_cast<int>(spec.offset),
                   .num_pairs = static_cast<int>(spec.inverse_frequencies.size()),
                   .interleaved = spec.interleaved,
                   .cosine_amplitude = spec.amplitude,
                   .sine_amplitude = inverse ? -spec.amplitude : spec.amplitude,
                   .x = from,
                   .positions = args.in(Op::kPositions).template as<int32_t>(),
                   .y = to};
  std::ranges::copy(spec.inverse_frequencies, rope.frequencies);
  return rope;
}

}  // namespace tessera::cuda
