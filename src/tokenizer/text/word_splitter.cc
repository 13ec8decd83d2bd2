#include "tokenizer/text/word_splitter.h"

#include <array>
#include <utility>

#include "tokenizer/text/unicode.h"

namespace tessera {

const std::string_view kGpt2Regex =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
const std::string_view kQwenRegex =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
const std::string_view kLlama3Regex =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

namespace {

constexpr std::string_view kShortGpt2Regex =
    R"('(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

constexpr CharacterClass ascii_class(unsigned char c) {
  if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) return CharacterClass::kLetter;
  if (c >= '0' && c <= '9') return CharacterClass::kNumber;
  return c == ' ' || (c >= '\t' && c <= '\r') ? CharacterClass::kSpace : CharacterClass::kOther;
}

constexpr auto kAsciiClasses = [] {
  std::array<CharacterClass, 128> classes{};
  for (size_t c = 0; c < classes.size(); ++c) {
    classes[c] = ascii_class(static_cast<unsigned char>(c));
  }
  return classes;
}();

struct Step {
  CharacterClass kind;
  size_t end;  ///< where the next character starts
};

Step step_at(std::string_view text, size_t position) {
  const auto c = static_cast<unsigned char>(text[position]);
  if (c < 0x80) return {kAsciiClasses[c], position + 1};
  const Character character = decode_character(text, position);
  return {character_class(character), position + character.num_bytes};
}

/// Where the run of one class ends that goes through `position`.
size_t skip_run(std::string_view text, size_t position, CharacterClass kind) {
  while (position < text.size()) {
    const Step step = step_at(text, position);
    if (step.kind != kind) break;
    position = step.end;
  }
  return position;
}

size_t skip_newlines(std::string_view text, size_t position) {
  while (position < text.size() && (text[position] == '\r' || text[position] == '\n')) ++position;
  return position;
}

bool is_newline(char c) {
  return c == '\r' || c == '\n';
}

/// A run of white space, of which the last character is left to the word that follows.
size_t end_of_space(std::string_view text, size_t position) {
  size_t before_last = position;
  size_t end = position;
  while (end < text.size()) {
    const Step step = step_at(text, end);
    if (step.kind != CharacterClass::kSpace) break;
    before_last = end;
    end = step.end;
  }
  return end < text.size() && before_last > position ? before_last : end;
}

/// Behind the last line end of a run of white space, or `position` where it has none.
size_t end_of_lines(std::string_view text, size_t position) {
  size_t end = position;
  while (position < text.size()) {
    const Step step = step_at(text, position);
    if (step.kind != CharacterClass::kSpace) break;
    if (is_newline(text[position])) end = step.end;
    position = step.end;
  }
  return end;
}

char lower(char c) {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}

/// Bytes of the contraction at an apostrophe, or 0.
size_t contraction(std::string_view text, bool any_case) {
  constexpr std::string_view kLongS = "\xC5\xBF";  // U+017F, which is a small s
  if (text.size() < 2) return 0;
  const char first = any_case ? lower(text[1]) : text[1];
  if (first == 's' || first == 't' || first == 'm' || first == 'd') return 2;
  if (text.size() < 3) return 0;
  if (any_case && text.substr(1, 2) == kLongS) return 3;
  const char second = any_case ? lower(text[2]) : text[2];
  const bool long_one =
      ((first == 'r' || first == 'v') && second == 'e') || (first == 'l' && second == 'l');
  return long_one ? 3 : 0;
}

size_t skip_digits(std::string_view text, size_t position, size_t max_digits) {
  for (size_t i = 0; i < max_digits && position < text.size(); ++i) {
    const Step step = step_at(text, position);
    if (step.kind != CharacterClass::kNumber) break;
    position = step.end;
  }
  return position;
}

}  // namespace

size_t WordSplitter::next_gpt2(std::string_view text, size_t position) const {
  if (text[position] == '\'') {
    const size_t size = contraction(text.substr(position), /*any_case=*/false);
    if (size > 0) return position + size;
  }
  const Step first = step_at(text, position);
  if (text[position] == ' ' && first.end < text.size()) {
    const Step second = step_at(text, first.end);
    if (second.kind != CharacterClass::kSpace) return skip_run(text, second.end, second.kind);
  }
  if (first.kind != CharacterClass::kSpace) return skip_run(text, first.end, first.kind);
  return end_of_space(text, position);
}

size_t WordSplitter::next_tiktoken(std::string_view text, size_t position) const {
  if (text[position] == '\'') {
    const size_t size = contraction(text.substr(position), /*any_case=*/true);
    if (size > 0) return position + size;
  }
  const Step first = step_at(text, position);
  if (first.kind == CharacterClass::kLetter) return skip_run(text, first.end, first.kind);
  if (first.kind == CharacterClass::kNumber) return skip_digits(text, position, max_digits_);
  if (first.end < text.size() && !is_newline(text[position])) {
    const Step second = step_at(text, first.end);
    if (second.kind == CharacterClass::kLetter) return skip_run(text, second.end, second.kind);
    if (text[position] == ' ' && second.kind == CharacterClass::kOther) {
      return skip_newlines(text, skip_run(text, second.end, second.kind));
    }
  }
  if (first.kind == CharacterClass::kOther) {
    return skip_newlines(text, skip_run(text, first.end, first.kind));
  }
  const size_t lines = end_of_lines(text, position);
  return lines > position ? lines : end_of_space(text, position);
}

std::optional<WordSplitter> find_word_splitter(std::string_view regex) {
  using Style = WordSplitter::Style;
  if (regex == kGpt2Regex || regex == kShortGpt2Regex) return WordSplitter(Style::kGpt2, 0);
  if (regex == kQwenRegex) return WordSplitter(Style::kTiktoken, 1);
  if (regex == kLlama3Regex) return WordSplitter(Style::kTiktoken, 3);
  return std::nullopt;
}

}  // namespace tessera
