#pragma once

#include <cstdint>

namespace tessera {

/// Which words StashPages and ReloadPages keep of a pool of pages, I64 each.
enum PoolState : int {
  kPoolPages,     ///< that it has; theirs to read alone
  kFreePages,     ///< that no value has
  kHeldPages,     ///< of all values that are stashed, also of those that found no room
  kMissingPages,  ///< the most by which these were more than the pool has; 0: all found room
  kPoolStates,
};

}  // namespace tessera
