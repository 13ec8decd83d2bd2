#include "tokenizer/text/regex_category.h"

#include <fmt/format.h>

#include <vector>

#include "core/error.h"
#include "tokenizer/text/pcre2_handle.h"
#include "tokenizer/text/unicode.h"

namespace tessera {
namespace {

std::string all_characters() {
  std::string text;
  for (char32_t code = 0; code < kNumCharacters; ++code) {
    if (code < 0xD800 || code > 0xDFFF) append_utf8(code, text);
  }
  return text;
}

/// Whether PCRE2 itself counts each character to a category.
std::vector<bool> pcre2_members(std::string_view name) {
  std::vector<bool> members(kNumCharacters);
  const std::string pattern = fmt::format("\\p{{{}}}+", name);
  int error = 0;
  PCRE2_SIZE offset = 0;
  const Pcre2Code code(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                                     PCRE2_UTF | PCRE2_UCP, &error, &offset, nullptr));
  ensure(code != nullptr, "PCRE2 does not know the general category {}", name);
  pcre2_jit_compile(code.get(), PCRE2_JIT_COMPLETE);  // only for speed
  const Pcre2MatchData match(pcre2_match_data_create(1, nullptr));
  const std::string text = all_characters();
  const PCRE2_SIZE* span = pcre2_get_ovector_pointer(match.get());
  PCRE2_SIZE position = 0;
  while (pcre2_match(code.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), position,
                     PCRE2_NO_UTF_CHECK, match.get(), nullptr) > 0) {
    for (position = span[0]; position < span[1];) {
      const Character character = decode_character(text, position);
      members[character.code] = true;
      position += character.num_bytes;
    }
  }
  return members;
}

std::string range_item(CharacterRange range) {
  const auto first = static_cast<uint32_t>(range.first);
  const auto last = static_cast<uint32_t>(range.last);
  return fmt::format("\\x{{{:x}}}-\\x{{{:x}}}", first, last);
}

/// The parts of the ranges that are no members yet.
std::string missing_items(const std::vector<CharacterRange>& ranges,
                          const std::vector<bool>& members) {
  std::string items;
  for (const CharacterRange& range : ranges) {
    char32_t first = range.first;
    for (char32_t code = range.first; code <= range.last + 1; ++code) {
      if (code <= range.last && !members[code]) continue;
      if (first < code) items += range_item({first, code - 1});
      first = code + 1;
    }
  }
  return items;
}

bool all_within(std::vector<bool> members, const std::vector<CharacterRange>& ranges) {
  for (const CharacterRange& range : ranges) {
    for (char32_t code = range.first; code <= range.last; ++code) members[code] = false;
  }
  for (const bool left_over : members) {
    if (left_over) return false;
  }
  return true;
}

}  // namespace

std::optional<std::string> category_items(std::string_view name) {
  auto ranges = category_ranges(name);
  if (!ranges || name == "Cs") return std::nullopt;
  // Surrogates stand in no valid text, and PCRE2 takes no range of them.
  std::vector<CharacterRange> kept;
  for (const CharacterRange& range : *ranges) {
    if (range.last < 0xD800 || range.first > 0xDFFF) {
      kept.push_back(range);
    } else {
      if (range.first < 0xD800) kept.push_back({range.first, 0xD7FF});
      if (range.last > 0xDFFF) kept.push_back({0xE000, range.last});
    }
  }
  const std::vector<bool> members = pcre2_members(name);
  if (all_within(members, kept)) {
    return fmt::format("\\p{{{}}}", name) + missing_items(kept, members);
  }
  return missing_items(kept, std::vector<bool>(kNumCharacters));
}

}  // namespace tessera
