#pragma once

#include <memory>

#include "comm/communicator.h"
#include "ops/backend.h"

namespace tessera::testing {

/// A device that is the host in disguise: it runs the host's kernels, but its memory has addresses
/// that nobody else may touch, so that whoever reads or writes it without the device crashes at
/// once. What is written for GPUs is tested with it on machines that have none; work is done when
/// it is given, so it shows nothing about order; what is copied on a lane is done as late as it
/// may, and what it overwrites is spoilt as early as it may. It can record, which
/// RunControl::graphs has switched off.
///
/// Kernels get what they get on a GPU: ragged dims, which must be the first, at their bounds.
Backend make_shadow_backend(KernelTable host_kernels);

/// A world whose tensors may be in the memory of such a back end: they travel through `host`, which
/// must outlive it.
std::unique_ptr<World> make_shadow_world(World& host, const Backend& backend);

}  // namespace tessera::testing
