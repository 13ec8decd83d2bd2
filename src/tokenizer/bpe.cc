#include "tokenizer/bpe.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "core/config/strict_json.h"
#include "core/error.h"
#include "tokenizer/text/unicode.h"

namespace tessera {
namespace {

constexpr uint32_t kNoRank = std::numeric_limits<uint32_t>::max();
/// Words of up to this many symbols are merged by looking for the best pair again and again, which
/// is faster than a heap.
constexpr size_t kShortWord = 48;

/// Orders a heap so that its top is what merges next.
bool merges_later(const BpeModel::Scratch::Candidate& a, const BpeModel::Scratch::Candidate& b) {
  return a.rank != b.rank ? a.rank > b.rank : a.position > b.position;
}

}  // namespace

BpeModel::BpeModel(const BpeDescription& description, std::string_view where)
    : unknown_text_(description.unknown),
      fuse_unknown_(description.fuse_unknown),
      byte_fallback_(description.byte_fallback),
      ignore_merges_(description.ignore_merges),
      byte_level_(description.byte_level) {
  ids_.reserve(description.vocabulary.size());
  for (const auto& [token, id] : description.vocabulary) {
    require(ids_.emplace(token, id).second, "{}: two tokens of the vocabulary are the text {}",
            where, quote_for_message(token));
  }
  if (unknown_text_) unknown_ = find(*unknown_text_);
  add_merges(description, where);
  for (int byte = 0; byte < 256; ++byte) {
    byte_ids_.push_back(byte_level_ ? find(std::string(1, static_cast<char>(byte))) : -1);
    fallback_ids_.push_back(byte_fallback_ ? find(fmt::format("<0x{:02X}>", byte)) : -1);
  }
}

void BpeModel::add_merges(const BpeDescription& description, std::string_view where) {
  merges_.reserve(description.merges.size());
  uint32_t rank = 0;
  for (const auto& [left, right] : description.merges) {
    const int32_t left_id = find(left);
    const int32_t right_id = find(right);
    const int32_t id = find(left + right);
    require(left_id >= 0 && right_id >= 0 && id >= 0,
            "{}: merge {} of {} and {}: {} is not in the vocabulary", where, rank,
            quote_for_message(left), quote_for_message(right),
            left_id < 0    ? "the first"
            : right_id < 0 ? "the second"
                           : "the two together");
    merges_.insert(left_id, right_id, rank++, id);
  }
}

int32_t BpeModel::find(std::string_view token) const {
  const auto found = ids_.find(token);
  return found == ids_.end() ? -1 : found->second;
}

void BpeModel::encode_word(std::string_view word, Scratch& scratch,
                           std::vector<int32_t>& ids) const {
  if (ignore_merges_) {
    const int32_t whole = find(word);
    if (whole >= 0) return ids.push_back(whole);
  }
  scratch.ids.clear();
  split(word, scratch.ids);
  if (scratch.ids.size() <= kShortWord) {
    merge_short(scratch);
  } else {
    merge_long(scratch);
  }
  ids.insert(ids.end(), scratch.ids.begin(), scratch.ids.end());
}

int32_t BpeModel::first_token(std::string_view character) const {
  return byte_level_ ? byte_ids_[static_cast<unsigned char>(character[0])] : find(character);
}

/// Adds the bytes of a character as tokens; false where one of them has none.
bool BpeModel::add_bytes(std::string_view character, std::vector<int32_t>& ids) const {
  const auto id_of = [this](char byte) { return fallback_ids_[static_cast<unsigned char>(byte)]; };
  if (!std::ranges::all_of(character, [&](char byte) { return id_of(byte) >= 0; })) return false;
  for (const char byte : character) ids.push_back(id_of(byte));
  return true;
}

/// The tokens of the single bytes or characters. As the package does it, an unknown character waits
/// for the next known one, and bytes that stand for a character go before it.
void BpeModel::split(std::string_view word, std::vector<int32_t>& ids) const {
  bool unknown_waits = false;
  for (size_t i = 0; i < word.size();) {
    const size_t size = byte_level_ ? 1 : decode_character(word, i).num_bytes;
    const std::string_view character = word.substr(i, size);
    i += size;
    const int32_t id = first_token(character);
    if (id >= 0) {
      if (unknown_waits) ids.push_back(unknown_);
      unknown_waits = false;
      ids.push_back(id);
    } else if ((byte_fallback_ && add_bytes(character, ids)) || !unknown_text_) {
      continue;
    } else {
      require(unknown_ >= 0,
              "text has {}, for which the tokenizer has neither a token nor its "
              "unk_token {}",
              quote_for_message(character), quote_for_message(*unknown_text_));
      if (unknown_waits && !fuse_unknown_) ids.push_back(unknown_);
      unknown_waits = true;
    }
  }
  if (unknown_waits) ids.push_back(unknown_);
}

void BpeModel::merge_short(Scratch& scratch) const {
  std::vector<int32_t>& ids = scratch.ids;
  std::vector<uint32_t>& ranks = scratch.ranks;  // of each id and the one after it
  const auto rank_at = [&](size_t i) {
    if (i + 1 >= ids.size()) return kNoRank;
    const PairMerge* merge = merges_.find(ids[i], ids[i + 1]);
    return merge == nullptr ? kNoRank : merge->rank;
  };
  ranks.clear();
  for (size_t i = 0; i < ids.size(); ++i) ranks.push_back(rank_at(i));
  while (ids.size() > 1) {
    const auto best = std::ranges::min_element(ranks);  // the leftmost of equal ones
    if (*best == kNoRank) return;
    const size_t i = best - ranks.begin();
    ids[i] = merges_.find(ids[i], ids[i + 1])->id;
    ids.erase(ids.begin() + static_cast<ptrdiff_t>(i) + 1);
    ranks.erase(best);
    ranks[i] = rank_at(i);
    if (i > 0) ranks[i - 1] = rank_at(i - 1);
  }
}

void BpeModel::push_candidate(Scratch& scratch, int32_t position) const {
  const Scratch::Symbol& left = scratch.symbols[position];
  if (left.next < 0) return;
  const PairMerge* merge = merges_.find(left.id, scratch.symbols[left.next].id);
  if (merge == nullptr) return;
  scratch.heap.push_back({merge->rank, position, merge->id});
  std::ranges::push_heap(scratch.heap, merges_later);
}

void BpeModel::merge_long(Scratch& scratch) const {
  std::vector<Scratch::Symbol>& symbols = scratch.symbols;
  const auto size = static_cast<int32_t>(scratch.ids.size());
  symbols.clear();
  scratch.heap.clear();
  for (int32_t i = 0; i < size; ++i) {
    symbols.push_back({scratch.ids[i], i - 1, i + 1 < size ? i + 1 : -1});
  }
  for (int32_t i = 0; i < size; ++i) push_candidate(scratch, i);
  while (!scratch.heap.empty()) {
    std::ranges::pop_heap(scratch.heap, merges_later);
    const Scratch::Candidate best = scratch.heap.back();
    scratch.heap.pop_back();
    Scratch::Symbol& left = symbols[best.position];
    if (left.merged || left.next < 0) continue;
    Scratch::Symbol& right = symbols[left.next];
    const PairMerge* merge = merges_.find(left.id, right.id);
    if (merge == nullptr || merge->id != best.id) continue;  // one of the two has changed since
    left.id = best.id;
    left.next = right.next;
    right.merged = true;
    if (left.next >= 0) symbols[left.next].previous = best.position;
    if (left.previous >= 0) push_candidate(scratch, left.previous);
    push_candidate(scratch, best.position);
  }
  scratch.ids.clear();
  for (int32_t i = 0; i >= 0 && size > 0; i = symbols[i].next) scratch.ids.push_back(symbols[i].id);
}

}  // namespace tessera
