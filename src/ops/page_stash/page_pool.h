#pragma once

#include <cstdint>

namespace tessera {

/// Pages of a device's memory that ragged values share.
struct PagePool {
  int64_t num_pages = 0;
  int64_t page_bytes = 0;  ///< a multiple of 16
};

/// Which words StashPages and ReloadPages keep of a pool, I64 each.
enum PoolState : int {
  kFreePages,
  kMissingPages,  ///< the most that a value lacked; 0: all found room
  kPoolStates,
};

}  // namespace tessera
