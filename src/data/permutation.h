#pragma once

#include <array>
#include <cstdint>

namespace tessera {

/// A pseudorandom permutation of [0, size) that takes no memory: a balanced Feistel network (Luby
/// and Rackoff, 1988) over the next even power of two with Philox as its round function, and cycle
/// walking (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002) back into the range.
/// A pure function of (size, key).
class Permutation {
 public:
  /// size > 0.
  Permutation(uint64_t size, uint64_t key);

  uint64_t size() const { return size_; }
  /// The image of `index`, which is below size.
  uint64_t operator()(uint64_t index) const;

 private:
  uint64_t encrypt(uint64_t block) const;

  uint64_t size_;
  std::array<uint32_t, 2> key_;
  int half_bits_;
};

}  // namespace tessera
