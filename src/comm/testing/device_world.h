#pragma once

#include <cstdint>
#include <memory>

#include "comm/communicator.h"

namespace tessera {

/// A world for tests that give tensors of the host: every operation goes through copies of them in
/// the memory of `device`, over `inner`, whose tensors may be there. `num_bytes` bounds what is
/// under way at a time. Both must outlive it.
std::unique_ptr<World> make_device_world(World& inner, Device& device, int64_t num_bytes);

}  // namespace tessera
