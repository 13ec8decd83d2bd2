#pragma once

#include <cstdint>
#include <span>

#include "ops/operator.h"

namespace tessera {

/// Throws UserError unless the bounds of packed sequences rise from 0 to `num_tokens`.
inline void check_cu_seqlens(const Operator& op, std::span<const int32_t> cu_seqlens,
                             int64_t num_tokens) {
  check_shape(op, cu_seqlens.front() == 0, "cu_seqlens starts at {}, expected 0",
              cu_seqlens.front());
  check_shape(op, cu_seqlens.back() == num_tokens, "cu_seqlens ends at {}, expected the {} tokens",
              cu_seqlens.back(), num_tokens);
  for (size_t i = 1; i < cu_seqlens.size(); ++i) {
    check_shape(op, cu_seqlens[i - 1] <= cu_seqlens[i],
                "cu_seqlens falls from {} to {} at index {}; it must not decrease",
                cu_seqlens[i - 1], cu_seqlens[i], i);
  }
}

}  // namespace tessera
