#include <fmt/format.h>

#include <array>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/config/strict_json.h"
#include "core/error.h"
#include "tokenizer/text/regex.h"
#include "tokenizer/text/regex_category.h"
#include "tokenizer/text/unicode.h"

namespace tessera {
namespace {

/// White_Space; PCRE2's own `\s` has U+180E as well.
constexpr std::string_view kSpaceItems =
    R"(\x{9}-\x{d}\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";
constexpr size_t kMaxPatternBytes = 1 << 16;

bool is_ascii_alnum(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
}

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

/// One character in PCRE2's spelling, whatever it means unquoted.
std::string quoted(char32_t code) {
  return fmt::format("\\x{{{:x}}}", static_cast<uint32_t>(code));
}

/// What an escape stands for: one character, or the inside of a character class.
struct Escape {
  char32_t code = 0;
  std::string items;     ///< empty: the character `code`
  bool negated = false;  ///< all characters but `items`
};

/// Reads a pattern from start to end and writes the PCRE2 one.
class Translator {
 public:
  Translator(std::string_view pattern, std::string_view where) : pattern_(pattern), where_(where) {}

  std::string run() {
    while (!at_end()) token();
    if (!caseless_.empty()) fail("a parenthesis is not closed");
    return std::move(out_);
  }

 private:
  [[noreturn]] void fail(std::string_view what) const {
    user_error("{}: the regular expression {} is not supported: {}, at byte {}", where_,
               quote_for_message(pattern_), what, position_);
  }
  bool at_end() const { return position_ >= pattern_.size(); }
  bool next_is(std::string_view text) const { return pattern_.substr(position_).starts_with(text); }
  bool take(std::string_view text) {
    const bool found = next_is(text);
    if (found) position_ += text.size();
    return found;
  }
  bool caseless() const { return !caseless_.empty() && caseless_.back(); }

  char32_t take_character() {
    if (at_end()) fail("it ends too early");
    const Character character = decode_character(pattern_, position_);
    if (!character.valid) fail("it is not UTF-8");
    position_ += character.num_bytes;
    return character.code;
  }

  void token();
  void group();
  void brace();
  void character_class();
  std::string class_item();
  void literal(char32_t code);
  Escape escape();
  Escape property(bool negated);
  const std::optional<std::string>& category(std::string_view name);
  char32_t code_point(size_t num_digits);

  std::string_view pattern_;
  std::string_view where_;
  size_t position_ = 0;
  std::string out_;
  /// Of each category asked for so far: finding the items takes a while.
  std::map<std::string, std::optional<std::string>, std::less<>> categories_;
  std::vector<bool> caseless_;  ///< of each open parenthesis
  char32_t previous_ = 0;       ///< literal just before, or 0
};

void Translator::token() {
  const char c = pattern_[position_];
  if (c != '\\' && std::string_view("[](){}*+?|^$.").find(c) == std::string_view::npos) {
    return literal(take_character());
  }
  previous_ = 0;
  if (c == '(') return group();
  if (c == '{') return brace();
  if (take("[")) return character_class();
  if (take("\\")) {
    const Escape found = escape();
    if (found.items.empty()) return literal(found.code);
    if (caseless()) fail("a set of characters in any case");
    out_ += fmt::format("[{}{}]", found.negated ? "^" : "", found.items);
    return;
  }
  if (c == ']') fail("']' without '['");
  if (c == ')') {
    if (caseless_.empty()) fail("')' without '('");
    caseless_.pop_back();
  }
  out_ += c;
  ++position_;
}

void Translator::group() {
  constexpr std::array<std::string_view, 7> kGroups = {
      "(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:"};
  for (const std::string_view start : kGroups) {
    if (!take(start)) continue;
    caseless_.push_back(caseless() || start == "(?i:");
    out_ += start;
    return;
  }
  if (next_is("(?") || next_is("(*")) fail("this kind of group");
  take("(");
  caseless_.push_back(caseless());
  out_ += "(?:";
}

void Translator::brace() {
  size_t end = position_ + 1;
  while (end < pattern_.size() && is_digit(pattern_[end])) ++end;
  const bool has_lower = end > position_ + 1;
  bool exact = true;
  if (end < pattern_.size() && pattern_[end] == ',') {
    exact = false;
    do ++end;
    while (end < pattern_.size() && is_digit(pattern_[end]));
  }
  if (!has_lower || end >= pattern_.size() || pattern_[end] != '}') {
    fail("'{' that begins no repetition");
  }
  out_ += pattern_.substr(position_, end + 1 - position_);
  position_ = end + 1;
  if (next_is("+") || (exact && next_is("?"))) fail("a repetition of a repetition");
}

void Translator::literal(char32_t code) {
  if (caseless()) {
    // Characters that stand for two when case is ignored, such as U+FB01 for "fi".
    constexpr std::array<std::u32string_view, 5> kLigatures = {U"ff", U"fi", U"fl", U"ss", U"st"};
    const char32_t lower = code >= 'A' && code <= 'Z' ? code + 32 : code;
    if (code >= 0x80) fail("a character outside ASCII in any case");
    for (const std::u32string_view pair : kLigatures) {
      if (previous_ == pair[0] && lower == pair[1]) fail("a ligature in any case");
    }
    previous_ = lower;
  }
  out_ += quoted(code);
}

void Translator::character_class() {
  out_ += '[';
  if (take("^")) out_ += '^';
  if (next_is("]")) fail("an empty set of characters");
  while (!take("]")) out_ += class_item();
  out_ += ']';
}

std::string Translator::class_item() {
  if (next_is("[")) fail("a set of characters within another");
  if (next_is("&&")) fail("an intersection of sets of characters");
  const Escape first = take("\\") ? escape() : Escape{.code = take_character()};
  const bool range = next_is("-") && !next_is("-]");
  if (!first.items.empty()) {
    if (caseless()) fail("a set of characters in any case");
    if (first.negated) fail("a negated set of characters within another");
    if (range) fail("a range that begins with a set");
    return first.items;
  }
  if (caseless() && first.code >= 0x80) fail("a character outside ASCII in any case");
  if (!range) return quoted(first.code);
  take("-");
  const Escape last = take("\\") ? escape() : Escape{.code = take_character()};
  if (!last.items.empty() || last.code < first.code) fail("a range that ends before it begins");
  if (caseless() && last.code >= 0x80) fail("a character outside ASCII in any case");
  return quoted(first.code) + "-" + quoted(last.code);
}

/// What follows a backslash.
Escape Translator::escape() {
  const char32_t code = take_character();
  switch (code) {
    case 'n':
      return {.code = '\n'};
    case 'r':
      return {.code = '\r'};
    case 't':
      return {.code = '\t'};
    case 'f':
      return {.code = '\f'};
    case 'v':
      return {.code = '\v'};
    case 'x':
    case 'u':
      return {.code = code_point(code == 'u' ? 4 : 2)};
    case 's':
    case 'S':
      return {.items = std::string(kSpaceItems), .negated = code == 'S'};
    case 'd':
    case 'D':
      return {.items = *category("Nd"), .negated = code == 'D'};
    case 'p':
    case 'P':
      return property(code == 'P');
    default:
      if (code >= 0x80 || is_ascii_alnum(static_cast<char>(code))) fail("this escape");
      return {.code = code};
  }
}

const std::optional<std::string>& Translator::category(std::string_view name) {
  const auto found = categories_.find(name);
  if (found != categories_.end()) return found->second;
  return categories_.emplace(name, category_items(name)).first->second;
}

/// "{L}" or "{^L}" behind `\p`.
Escape Translator::property(bool negated) {
  if (!take("{")) fail("a property without braces");
  if (take("^")) negated = !negated;
  const size_t end = pattern_.find('}', position_);
  if (end == std::string_view::npos) fail("a property without its closing brace");
  const auto& items = category(pattern_.substr(position_, end - position_));
  if (!items) fail("a property other than a general category such as \\p{L} or \\p{Lu}");
  position_ = end + 1;
  return {.items = *items, .negated = negated};
}

/// The number behind `\x` or `\u`, with braces or of a fixed number of digits.
char32_t Translator::code_point(size_t num_digits) {
  const bool braces = num_digits == 2 && take("{");
  const size_t end = braces ? pattern_.find('}', position_) : position_ + num_digits;
  if (end > pattern_.size() || end == position_ || end - position_ > 6) fail("this character");
  char32_t code = 0;
  for (; position_ < end; ++position_) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    const size_t digit = kDigits.find(static_cast<char>(pattern_[position_] | 0x20));
    const bool is_hexadecimal = is_ascii_alnum(pattern_[position_]) && digit != kDigits.npos;
    if (!is_hexadecimal) fail("this character");
    code = code * 16 + static_cast<char32_t>(digit);
  }
  if (braces) take("}");
  const bool raw_byte = num_digits == 2 && !braces && code >= 0x80;
  if (raw_byte || code >= kNumCharacters || (code >= 0xD800 && code <= 0xDFFF)) {
    fail("this character");
  }
  return code;
}

}  // namespace

std::string translate_regex(std::string_view pattern, std::string_view where) {
  require(pattern.size() <= kMaxPatternBytes,
          "{}: a regular expression of {} bytes; at most {} are supported", where, pattern.size(),
          kMaxPatternBytes);
  return Translator(pattern, where).run();
}

}  // namespace tessera
