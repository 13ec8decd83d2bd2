#include "tokenizer/bpe_merger.h"

#include <algorithm>

namespace tessera {

BpeMerger::BpeMerger(const std::vector<CountedWord>& words) {
  for (int byte = 0; byte < 256; ++byte) {
    tokens_.emplace_back(1, static_cast<char>(byte));
    ids_.emplace(tokens_.back(), byte);
  }
  for (const CountedWord& counted : words) {
    Word word{.count = counted.count};
    for (const char byte : counted.text) word.ids.push_back(static_cast<unsigned char>(byte));
    words_.push_back(std::move(word));
  }
  for (size_t w = 0; w < words_.size(); ++w) {
    const std::vector<int32_t>& ids = words_[w].ids;
    for (size_t i = 0; i + 1 < ids.size(); ++i) {
      change(ids[i], ids[i + 1], words_[w].count, static_cast<int32_t>(w));
    }
  }
  grown_.clear();
  for (const auto& [pair_key, pair] : pairs_) heap_.push({pair.count, pair_key});
}

bool BpeMerger::merge_next(int64_t min_frequency) {
  while (!heap_.empty()) {
    const Candidate best = heap_.top();
    heap_.pop();
    const auto found = pairs_.find(best.key);
    const int64_t count = found == pairs_.end() ? 0 : found->second.count;
    if (count != best.count) {
      // Counts that grow enter the heap at once, those that fall when they come up.
      if (count > 0 && count < best.count) heap_.push({count, best.key});
      continue;
    }
    if (count < min_frequency || count <= 0) return false;
    const auto left = static_cast<int32_t>(best.key >> 32);
    const auto right = static_cast<int32_t>(best.key & 0xFFFFFFFF);
    const std::vector<int32_t> words = std::move(found->second.words);
    const int32_t id = token_of(left, right);
    merges_.emplace_back(left, right);
    for (const int32_t word : words) merge_in_word(word, left, right, id);
    pairs_.erase(best.key);
    std::ranges::sort(grown_);
    grown_.erase(std::unique(grown_.begin(), grown_.end()), grown_.end());
    for (const uint64_t grown : grown_) {
      const auto pair = pairs_.find(grown);
      if (pair != pairs_.end()) heap_.push({pair->second.count, grown});
    }
    grown_.clear();
    return true;
  }
  return false;
}

int32_t BpeMerger::token_of(int32_t left, int32_t right) {
  std::string text = tokens_[left] + tokens_[right];
  const auto [found, added] = ids_.emplace(text, static_cast<int32_t>(tokens_.size()));
  if (added) tokens_.push_back(std::move(text));
  return found->second;
}

void BpeMerger::merge_in_word(int32_t word_index, int32_t left, int32_t right, int32_t id) {
  Word& word = words_[word_index];
  std::vector<int32_t>& ids = word.ids;
  size_t kept = 0;
  for (size_t i = 0; i < ids.size(); ++kept) {
    const bool match = ids[i] == left && i + 1 < ids.size() && ids[i + 1] == right;
    if (!match) {
      ids[kept] = ids[i++];
      continue;
    }
    // The pair's own count goes with it at the end.
    if (kept > 0) {
      change(ids[kept - 1], left, -word.count, word_index);
      change(ids[kept - 1], id, word.count, word_index);
    }
    if (i + 2 < ids.size()) {
      change(right, ids[i + 2], -word.count, word_index);
      change(id, ids[i + 2], word.count, word_index);
    }
    ids[kept] = id;
    i += 2;
  }
  ids.resize(kept);
}

void BpeMerger::change(int32_t left, int32_t right, int64_t count, int32_t word_index) {
  const uint64_t pair_key = key(left, right);
  Pair& pair = pairs_[pair_key];
  pair.count += count;
  if (count <= 0) return;
  if (pair.words.empty() || pair.words.back() != word_index) pair.words.push_back(word_index);
  grown_.push_back(pair_key);
}

}  // namespace tessera
