#pragma once

namespace tessera::attention {

/// The inputs and outputs of the operators by position. Those of the backward operators begin with
/// q, k and v too, and of AttentionCached with q and the caches of k and v.
enum Input : int { kQ, kK, kV, kForwardCuSeqlens };
enum Output : int { kO, kLse };
enum CachedInput : int { kCacheLength = 3 };
enum BackwardInput : int { kSavedO = 3, kSavedLse, kGradO, kBackwardCuSeqlens, kGradLse };
enum BackwardOutput : int { kGradQ, kGradK, kGradV };

}  // namespace tessera::attention
