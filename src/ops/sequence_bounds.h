#pragma once

#include <cstdint>
#include <span>

#include "core/error.h"
#include "ops/operator.h"

namespace tessera {

/// The bounds cu_seqlens of packed sequences on the host. Throws UserError unless they rise from 0
/// to `num_tokens`.
inline std::span<const int32_t> read_sequence_bounds(const Operator& op, const Tensor& cu_seqlens,
                                                     int64_t num_tokens) {
  const std::span<const int32_t> bounds(cu_seqlens.as<int32_t>(),
                                        static_cast<size_t>(cu_seqlens.shape[0]));
  require(bounds.front() == 0 && bounds.back() == num_tokens,
          "{}: cu_seqlens goes from {} to {}, expected 0 to the {} tokens", op.name(),
          bounds.front(), bounds.back(), num_tokens);
  for (size_t s = 1; s < bounds.size(); ++s) {
    require(bounds[s - 1] <= bounds[s], "{}: cu_seqlens falls from {} to {} at sequence {}",
            op.name(), bounds[s - 1], bounds[s], s - 1);
  }
  return bounds;
}

}  // namespace tessera
