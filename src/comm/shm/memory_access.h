#pragma once

#include <string>

namespace tessera {

/// Whether the system lets ranks of this machine read one another's memory: empty, or why not.
/// Tries it with a child, which reads its parent as one rank reads another.
std::string why_memory_is_not_shared();

}  // namespace tessera
