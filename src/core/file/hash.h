#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace tessera {

/// The 64-bit hash XXH64 with seed 0, over bytes that arrive in pieces (Yann Collet, "xxHash fast
/// digest algorithm", github.com/Cyan4973/xxHash, doc/xxhash_spec.md). It guards against damage,
/// not against forgery.
class Hash64 {
 public:
  Hash64();
  void update(std::span<const std::byte> bytes);
  /// The hash of all bytes so far; more may follow.
  uint64_t digest() const;

 private:
  static constexpr size_t kStripe = 32;

  void consume(const std::byte* stripe);

  std::array<uint64_t, 4> lanes_;
  std::array<std::byte, kStripe> pending_{};
  size_t num_pending_ = 0;
  uint64_t num_bytes_ = 0;
};

uint64_t hash64(std::span<const std::byte> bytes);
inline uint64_t hash64(std::string_view text) {
  return hash64(std::as_bytes(std::span(text)));
}

}  // namespace tessera
