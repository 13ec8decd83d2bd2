#pragma once

#include <cstdint>
#include <queue>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tessera {

/// A word of the training text and how often it occurs.
struct CountedWord {
  std::string text;
  int64_t count = 0;
};

/// Finds the merges of a byte-pair encoding. Ids 0 to 255 are the bytes; each merge makes the next
/// id, or finds again that of a token of the same bytes. Counts of pairs, and the words that each
/// stands in, are kept up to date: a merge costs as much as the words that it changes.
class BpeMerger {
 public:
  explicit BpeMerger(const std::vector<CountedWord>& words);

  /// Makes the next merge; false where no pair occurs `min_frequency` times.
  bool merge_next(int64_t min_frequency);
  int64_t num_tokens() const { return static_cast<int64_t>(tokens_.size()); }
  const std::vector<std::string>& tokens() const { return tokens_; }
  const std::vector<std::pair<int32_t, int32_t>>& merges() const { return merges_; }

 private:
  struct Word {
    std::vector<int32_t> ids;
    int64_t count = 0;
  };
  struct Pair {
    int64_t count = 0;
    std::vector<int32_t> words;  ///< that may have it, some more than once
  };
  struct Candidate {
    int64_t count = 0;
    uint64_t key = 0;
    bool operator<(const Candidate& other) const {
      return count != other.count ? count < other.count : key > other.key;
    }
  };

  static uint64_t key(int32_t left, int32_t right) {
    return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
  }
  int32_t token_of(int32_t left, int32_t right);
  void merge_in_word(int32_t word_index, int32_t left, int32_t right, int32_t id);
  void change(int32_t left, int32_t right, int64_t count, int32_t word_index);

  std::vector<Word> words_;
  std::unordered_map<uint64_t, Pair> pairs_;
  std::priority_queue<Candidate> heap_;
  std::vector<uint64_t> grown_;  ///< pairs that the current merge has made more frequent
  std::vector<std::string> tokens_;
  std::unordered_map<std::string, int32_t> ids_;
  std::vector<std::pair<int32_t, int32_t>> merges_;
};

}  // namespace tessera
