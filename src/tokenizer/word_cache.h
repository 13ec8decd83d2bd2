#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

namespace tessera {

/// The ids of words met before: a table of fixed size in which a word takes the place of another
/// with the same slot. Long words, and words of many ids, are not kept. For one thread.
class WordCache {
 public:
  WordCache() : entries_(kNumEntries) {}

  /// The slot of a word, for `find` and `insert`.
  static uint64_t hash(std::string_view word) {
    uint64_t state = word.size() * 0x9E3779B97F4A7C15ULL;
    while (word.size() >= 8) {
      state = mix(state ^ load(word.data(), 8));
      word.remove_prefix(8);
    }
    return mix(state ^ load(word.data(), word.size()));
  }

  /// The ids of a word, or nothing where it is not there; no word has no ids.
  std::span<const int32_t> find(std::string_view word, uint64_t hash) const {
    const Entry& entry = entries_[hash % kNumEntries];
    const bool same = entry.num_bytes == word.size() && entry.num_ids > 0 &&
                      std::memcmp(entry.word.data(), word.data(), word.size()) == 0;
    return same ? std::span<const int32_t>(entry.ids.data(), entry.num_ids)
                : std::span<const int32_t>();
  }

  void insert(std::string_view word, uint64_t hash, std::span<const int32_t> ids) {
    Entry& entry = entries_[hash % kNumEntries];
    if (word.size() > entry.word.size() || ids.size() > entry.ids.size()) return;
    entry.num_bytes = static_cast<uint8_t>(word.size());
    entry.num_ids = static_cast<uint8_t>(ids.size());
    std::memcpy(entry.word.data(), word.data(), word.size());
    std::memcpy(entry.ids.data(), ids.data(), ids.size_bytes());
  }

 private:
  static constexpr size_t kNumEntries = size_t{1} << 15;
  /// One line of the processor's cache.
  struct alignas(64) Entry {
    std::array<int32_t, 8> ids;
    std::array<char, 30> word;
    uint8_t num_bytes = 0;
    uint8_t num_ids = 0;
  };
  static_assert(sizeof(Entry) == 64);

  static uint64_t load(const char* data, size_t num_bytes) {
    uint64_t value = 0;
    std::memcpy(&value, data, num_bytes);
    return value;
  }
  static uint64_t mix(uint64_t value) {
    value *= 0xD6E8FEB86659FD93ULL;
    return value ^ value >> 32;
  }

  std::vector<Entry> entries_;
};

}  // namespace tessera
