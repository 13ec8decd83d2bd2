#include "tokenizer/added_tokens.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "tokenizer/text/unicode.h"

namespace tessera {
namespace {

bool word_ends_at(std::string_view text, size_t position) {
  return position > 0 && is_word_character(decode_character_before(text, position));
}

bool word_starts_at(std::string_view text, size_t position) {
  return position < text.size() && is_word_character(decode_character(text, position));
}

size_t skip_space_before(std::string_view text, size_t position) {
  while (position > 0) {
    const Character character = decode_character_before(text, position);
    if (character_class(character) != CharacterClass::kSpace) break;
    position -= character.num_bytes;
  }
  return position;
}

size_t skip_space(std::string_view text, size_t position) {
  while (position < text.size()) {
    const Character character = decode_character(text, position);
    if (character_class(character) != CharacterClass::kSpace) break;
    position += character.num_bytes;
  }
  return position;
}

}  // namespace

void TextFinder::add(std::string_view text, int32_t value) {
  int32_t node = 0;
  for (const char byte : text) {
    const uint64_t key = static_cast<uint64_t>(node) << 8 | static_cast<unsigned char>(byte);
    const auto next = static_cast<int32_t>(values_.size());
    const auto [found, added] = children_.emplace(key, next);
    if (added) values_.push_back(kNone);
    node = found->second;
  }
  if (values_[node] == kNone) values_[node] = value;
  const auto start = static_cast<unsigned char>(text[0]);
  only_start_ = longest_ == 0 || only_start_ == start ? start : -1;
  starts_[start] = true;
  longest_ = std::max(longest_, text.size());
}

int32_t TextFinder::child(int32_t node, char byte) const {
  const auto found =
      children_.find(static_cast<uint64_t>(node) << 8 | static_cast<unsigned char>(byte));
  return found == children_.end() ? kNone : found->second;
}

TextFinder::Match TextFinder::longest_at(std::string_view text, size_t position) const {
  Match match;
  int32_t node = 0;
  for (size_t i = position; i < text.size(); ++i) {
    node = child(node, text[i]);
    if (node == kNone) break;
    if (values_[node] != kNone) match = {position, i + 1, values_[node]};
  }
  return match;
}

TextFinder::Match TextFinder::find(std::string_view text, size_t position) const {
  if (empty()) return {};
  for (; position < text.size(); ++position) {
    if (only_start_ >= 0) {
      position = text.find(static_cast<char>(only_start_), position);
      if (position == std::string_view::npos) break;
    } else if (!starts_[static_cast<unsigned char>(text[position])]) {
      continue;
    }
    const Match match = longest_at(text, position);
    if (match.value != kNone) return match;
  }
  return {};
}

bool TextFinder::touches(std::string_view text, size_t position) const {
  const size_t first = position - std::min(position, longest_);
  for (size_t begin = first; begin <= position && begin < text.size(); ++begin) {
    if (longest_at(text, begin).end >= std::max<size_t>(position, 1)) return true;
  }
  return false;
}

AddedTokens::AddedTokens(std::vector<AddedToken> tokens, const Normalizer& normalizer)
    : tokens_(std::move(tokens)) {
  std::string buffer;
  // As the package does, special tokens go first: they win over others of the same text.
  for (const bool special : {true, false}) {
    for (size_t i = 0; i < tokens_.size(); ++i) {
      const AddedToken& token = tokens_[i];
      if (token.special != special) continue;
      const auto index = static_cast<int32_t>(i);
      if (token.normalized) {
        normalized_.add(normalizer.apply(token.content, buffer), index);
      } else {
        raw_.add(token.content, index);
      }
    }
  }
}

void AddedTokens::split(std::string_view text, const TextFinder& finder,
                        std::vector<Piece>& pieces) const {
  size_t done = 0;
  size_t position = 0;
  for (;;) {
    const TextFinder::Match match = finder.find(text, position);
    if (match.value < 0) break;
    position = match.end;
    const AddedToken& token = tokens_[match.value];
    size_t begin = match.begin;
    size_t end = match.end;
    if (token.single_word && (word_ends_at(text, begin) || word_starts_at(text, end))) continue;
    if (token.lstrip) begin = std::max(skip_space_before(text, begin), done);
    if (token.rstrip) end = skip_space(text, end);
    if (done < begin) pieces.push_back({text.substr(done, begin - done)});
    pieces.push_back({text.substr(begin, end - begin), token.id});
    done = end;
  }
  if (done < text.size()) pieces.push_back({text.substr(done)});
}

}  // namespace tessera
