#pragma once

namespace tessera {

/// Whether this process may use the tile registers of AMX: the level in use has them, and the
/// operating system, which is asked once, gives them.
bool may_use_tiles();

}  // namespace tessera
