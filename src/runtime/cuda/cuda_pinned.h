#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera::cuda {

/// Zeroed memory of the host that GPUs reach and copy at full speed; null where it cannot be had.
/// Of much, several threads ask for the pages, in huge ones where the system gives them: the driver
/// alone takes a minute for 100 GiB.
std::byte* allocate_pinned(int64_t num_bytes);
/// REQUIRES that it is of allocate_pinned(num_bytes).
void release_pinned(std::byte* data, int64_t num_bytes) noexcept;

}  // namespace tessera::cuda
