#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

namespace tessera {

/// The ways to split text into words that common tokenizers share, written by hand for speed. Each
/// is the exact equivalent of regular expressions that `find_word_splitter` knows.
class WordSplitter {
 public:
  /// A word ends where the next begins: nothing lies between.
  enum class Style {
    kGpt2,     ///< contractions; letters, numbers or the rest, each with the space before it
    kTiktoken  ///< contractions in any case; letters with one character before them; few digits
  };
  /// Digits of one word where the style limits them.
  WordSplitter(Style style, size_t max_digits) : style_(style), max_digits_(max_digits) {}

  /// Where the word that starts at `position` ends; position < text.size().
  size_t next(std::string_view text, size_t position) const {
    return style_ == Style::kGpt2 ? next_gpt2(text, position) : next_tiktoken(text, position);
  }

 private:
  size_t next_gpt2(std::string_view text, size_t position) const;
  size_t next_tiktoken(std::string_view text, size_t position) const;

  Style style_;
  size_t max_digits_;
};

/// The regular expression of GPT-2, which the ByteLevel pre-tokenizer stands for.
extern const std::string_view kGpt2Regex;
/// Those of Qwen (`max_digits` 1) and Llama 3 (3).
extern const std::string_view kQwenRegex;
extern const std::string_view kLlama3Regex;

/// The splitter that does what a regular expression does, if its text is one of the known ones.
std::optional<WordSplitter> find_word_splitter(std::string_view regex);

}  // namespace tessera
