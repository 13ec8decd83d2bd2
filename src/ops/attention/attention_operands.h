#pragma once

#include <cstddef>

namespace tessera::attention {

/// The inputs and outputs of the operators by position.
enum Input : size_t { kQ, kK, kV, kForwardCuSeqlens };
enum Output : size_t { kO, kLse };
enum BackwardInput : size_t { kSavedO = 3, kSavedLse, kGradO, kBackwardCuSeqlens, kGradLse };
enum BackwardOutput : size_t { kGradQ, kGradK, kGradV };

}  // namespace tessera::attention
