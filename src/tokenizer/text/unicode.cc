#include "tokenizer/text/unicode.h"

#include <algorithm>
#include <array>

namespace tessera {
namespace {

constexpr std::array<std::string_view, 30> kCategoryNames = {
    "Cn", "Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No", "Pc", "Pd", "Ps",
    "Pe", "Pi", "Pf", "Po", "Sm", "Sc", "Sk", "So", "Zs", "Zl", "Zp", "Cc", "Cf", "Cs", "Co"};

/// Starts of runs of one category: first character << 8 | index into kCategoryNames.
constexpr auto kRuns = std::to_array<uint32_t>({
#include "tokenizer/text/unicode_table.inc"
});

/// One byte a character, kept in two stages: equal blocks are stored once.
class CharacterTable {
 public:
  template <typename Value>
  explicit CharacterTable(Value value_of) {
    std::array<uint8_t, kBlock> block{};
    for (char32_t first = 0; first < kNumCharacters; first += kBlock) {
      for (char32_t i = 0; i < kBlock; ++i) block[i] = value_of(first + i);
      const auto found = std::ranges::find(blocks_, block);
      index_[first / kBlock] = static_cast<uint16_t>(found - blocks_.begin());
      if (found == blocks_.end()) blocks_.push_back(block);
    }
  }

  uint8_t operator[](char32_t code) const { return blocks_[index_[code / kBlock]][code % kBlock]; }

 private:
  static constexpr char32_t kBlock = 256;

  std::array<uint16_t, kNumCharacters / kBlock> index_{};
  std::vector<std::array<uint8_t, kBlock>> blocks_;
};

/// Gives the categories of characters asked for in rising order.
class CategoryWalk {
 public:
  uint8_t operator()(char32_t code) {
    while (run_ + 1 < kRuns.size() && kRuns[run_ + 1] >> 8 <= code) ++run_;
    return static_cast<uint8_t>(kRuns[run_] & 0xff);
  }

 private:
  size_t run_ = 0;
};

const CharacterTable& category_table() {
  static const CharacterTable table{CategoryWalk()};
  return table;
}

std::string_view category_name(char32_t code) {
  return kCategoryNames[category_table()[code]];
}

bool is_white_space(char32_t code) {
  return (code >= 0x09 && code <= 0x0d) || code == 0x85 || category_name(code).front() == 'Z';
}

uint8_t class_of(char32_t code) {
  const char group = category_name(code).front();
  const auto value = group == 'L'           ? CharacterClass::kLetter
                     : group == 'N'         ? CharacterClass::kNumber
                     : is_white_space(code) ? CharacterClass::kSpace
                                            : CharacterClass::kOther;
  return static_cast<uint8_t>(value);
}

/// Bytes of the UTF-8 sequence that starts with `lead`, or 0.
uint32_t sequence_length(uint8_t lead) {
  if (lead < 0x80) return 1;
  if (lead < 0xC2 || lead > 0xF4) return 0;
  return lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
}

bool is_continuation(char byte) {
  return (static_cast<uint8_t>(byte) & 0xC0) == 0x80;
}

}  // namespace

Character decode_character(std::string_view text, size_t position) {
  constexpr std::array<char32_t, 5> kSmallest = {0, 0, 0x80, 0x800, 0x10000};
  const auto lead = static_cast<uint8_t>(text[position]);
  if (lead < 0x80) return {lead, 1, true};
  const uint32_t length = sequence_length(lead);
  if (length == 0 || length > text.size() - position) return {lead, 1, false};
  char32_t code = lead & (0x7FU >> length);
  for (uint32_t i = 1; i < length; ++i) {
    const char byte = text[position + i];
    if (!is_continuation(byte)) return {lead, 1, false};
    code = code << 6 | (static_cast<uint8_t>(byte) & 0x3FU);
  }
  const bool valid =
      code >= kSmallest[length] && code < kNumCharacters && (code < 0xD800 || code > 0xDFFF);
  return valid ? Character{code, length, true} : Character{lead, 1, false};
}

Character decode_character_before(std::string_view text, size_t position) {
  for (size_t length = 1; length <= std::min<size_t>(4, position); ++length) {
    if (length < 4 && is_continuation(text[position - length])) continue;
    const Character character = decode_character(text.substr(0, position), position - length);
    if (character.valid && character.num_bytes == length) return character;
    break;
  }
  return {static_cast<uint8_t>(text[position - 1]), 1, false};
}

void append_utf8(char32_t code, std::string& text) {
  const auto add = [&text](char32_t byte) { text += static_cast<char>(byte); };
  if (code < 0x80) return add(code);
  if (code < 0x800) {
    add(0xC0 | code >> 6);
  } else if (code < 0x10000) {
    add(0xE0 | code >> 12);
    add(0x80 | (code >> 6 & 0x3F));
  } else {
    add(0xF0 | code >> 18);
    add(0x80 | (code >> 12 & 0x3F));
    add(0x80 | (code >> 6 & 0x3F));
  }
  add(0x80 | (code & 0x3F));
}

CharacterClass character_class(char32_t code) {
  static const CharacterTable table(class_of);
  return static_cast<CharacterClass>(table[code]);
}

bool is_word_character(const Character& character) {
  if (!character.valid) return false;
  const std::string_view name = category_name(character.code);
  const bool join_control = character.code == 0x200C || character.code == 0x200D;
  const bool circled_letter = (character.code >= 0x24B6 && character.code <= 0x24E9) ||
                              (character.code >= 0x1F130 && character.code <= 0x1F149) ||
                              (character.code >= 0x1F150 && character.code <= 0x1F169) ||
                              (character.code >= 0x1F170 && character.code <= 0x1F189);
  return name.front() == 'L' || name.front() == 'M' || name == "Nd" || name == "Nl" ||
         name == "Pc" || join_control || circled_letter;
}

std::optional<std::vector<CharacterRange>> category_ranges(std::string_view name) {
  std::vector<CharacterRange> ranges;
  bool known = false;
  for (const std::string_view category : kCategoryNames) known |= category.starts_with(name);
  if (!known || name.empty()) return std::nullopt;
  for (size_t i = 0; i < kRuns.size(); ++i) {
    if (!kCategoryNames[kRuns[i] & 0xff].starts_with(name)) continue;
    const char32_t first = kRuns[i] >> 8;
    const char32_t end = i + 1 < kRuns.size() ? kRuns[i + 1] >> 8 : kNumCharacters;
    if (!ranges.empty() && ranges.back().last + 1 == first) {
      ranges.back().last = end - 1;
    } else {
      ranges.push_back({first, end - 1});
    }
  }
  return ranges;
}

}  // namespace tessera
