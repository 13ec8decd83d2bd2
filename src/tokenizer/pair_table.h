#pragma once

#include <bit>
#include <cstdint>
#include <vector>

namespace tessera {

/// What two neighbouring tokens become.
struct PairMerge {
  uint64_t key = kNoKey;
  uint32_t rank = 0;  ///< lower ones come first
  int32_t id = 0;

  static constexpr uint64_t kNoKey = ~uint64_t{0};
};

/// A flat hash map from pairs of ids, none negative, to their merges: open addressing with linear
/// steps, at most half full.
class PairTable {
 public:
  void reserve(size_t num_pairs) {
    entries_.assign(std::bit_ceil(2 * num_pairs + 2), {});
    shift_ = 64 - std::countr_zero(entries_.size());
  }

  /// Adds or replaces a pair; at most as many as were reserved.
  void insert(int32_t left, int32_t right, uint32_t rank, int32_t id) {
    entries_[slot(key(left, right))] = {key(left, right), rank, id};
  }

  /// The merge of a pair, or null.
  const PairMerge* find(int32_t left, int32_t right) const {
    const PairMerge& entry = entries_[slot(key(left, right))];
    return entry.key == PairMerge::kNoKey ? nullptr : &entry;
  }

 private:
  static uint64_t key(int32_t left, int32_t right) {
    return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
  }
  size_t slot(uint64_t key) const {
    size_t index = (key * 0x9E3779B97F4A7C15ULL) >> shift_;
    while (entries_[index].key != key && entries_[index].key != PairMerge::kNoKey) {
      index = (index + 1) & (entries_.size() - 1);
    }
    return index;
  }

  std::vector<PairMerge> entries_;
  int shift_ = 0;
};

}  // namespace tessera
