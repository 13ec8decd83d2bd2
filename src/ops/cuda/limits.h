#pragma once

#include <cstdint>
#include <string_view>

#include "ops/operator.h"

namespace tessera::cuda {

/// Refuses `count` of something ("experts") where an operator's kernels take at most `limit`. For
/// the functions that give the scratch memory, so that a program is refused when it is planned.
inline void check_limit(const Operator& op, int64_t count, int64_t limit, std::string_view what) {
  require(count <= limit,
          "{} {} are more than the {} that {} takes on a GPU; use fewer, or run.device = \"cpu\"",
          count, what, limit, op.name());
}

}  // namespace tessera::cuda
