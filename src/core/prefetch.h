#pragma once

#include <cstddef>
#include <span>

namespace tessera {

/// Asks for memory that is about to be read, all of it at once, so that what no cache has takes one
/// wait in place of many.
inline void prefetch(std::span<const std::byte> bytes) {
  constexpr size_t kCacheLine = 64;
  for (size_t at = 0; at < bytes.size(); at += kCacheLine) __builtin_prefetch(bytes.data() + at);
}

}  // namespace tessera
