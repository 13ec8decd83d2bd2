#include "data/permutation.h"

#include <algorithm>
#include <bit>

#include "core/error.h"
#include "core/random.h"

namespace tessera {

Permutation::Permutation(uint64_t size, uint64_t key)
    : size_(size),
      key_{static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)},
      half_bits_(std::max(1, (static_cast<int>(std::bit_width(size - 1)) + 1) / 2)) {
  ensure(size > 0, "a permutation of nothing");
}

uint64_t Permutation::operator()(uint64_t index) const {
  ensure(index < size_, "index {} of a permutation of {}", index, size_);
  // At most four times the range is walked through, so the expected number of rounds is below four.
  do index = encrypt(index);
  while (index >= size_);
  return index;
}

uint64_t Permutation::encrypt(uint64_t block) const {
  constexpr uint32_t kRounds = 8;
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  uint64_t left = block >> half_bits_;
  uint64_t right = block & mask;
  for (uint32_t round = 0; round < kRounds; ++round) {
    const auto word = philox({static_cast<uint32_t>(right), round, 0, 0}, key_)[0];
    const uint64_t next = left ^ (word & mask);
    left = right;
    right = next;
  }
  return (left << half_bits_) | right;
}

}  // namespace tessera
