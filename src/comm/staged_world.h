#pragma once

#include <memory>

#include "comm/communicator.h"

namespace tessera {

/// The ranks of `host`, which must outlive it, with communicators that take the tensors of devices
/// as well: these travel through buffers of the host. What is sent is copied when an operation is
/// started, after all work that the device was given before, and what arrives when it is waited
/// for. So ranks may share a device, and none needs a library that moves a device's memory. The
/// host's tensors go to `host` as they are.
std::unique_ptr<World> make_staged_world(World& host);

}  // namespace tessera
