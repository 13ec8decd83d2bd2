#pragma once

#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/text/regex.h"
#include "tokenizer/text/word_splitter.h"

namespace tessera {

/// What happens to the places that a splitting step finds.
enum class SplitBehavior {
  kRemoved,
  kIsolated,  ///< each a word of its own
  kMergedWithPrevious,
  kMergedWithNext,
  kContiguous  ///< neighbouring ones together
};

/// Splits each piece at the matches of a regular expression.
struct RegexSplit {
  std::optional<WordSplitter> known;  ///< does the same faster
  std::optional<Regex> regex;         ///< null where `known` is there
  SplitBehavior behavior = SplitBehavior::kIsolated;
  bool invert = false;  ///< the text between matches counts as the match
};

/// Splits off the numbers.
struct DigitSplit {
  bool individual = false;  ///< each digit alone
};

/// Puts a space before a piece that does not begin with one.
struct SpacePrefix {};

/// Replaces spaces by a mark, as SentencePiece does.
struct MarkSpaces {
  enum class Prepend { kAlways, kFirst, kNever };
  std::string mark;
  Prepend prepend = Prepend::kAlways;  ///< a mark before which pieces that begin with none
  bool split = true;                   ///< before each mark
};

/// How text is split into the words that byte-pair encoding works on. Immutable.
class PreTokenizer {
 public:
  /// One step; exactly one member is set.
  struct Step {
    std::optional<RegexSplit> regex;
    std::optional<DigitSplit> digits;
    std::optional<SpacePrefix> prefix;
    std::optional<MarkSpaces> mark;
  };
  /// Memory of one thread, to be kept from one text to the next.
  struct Scratch {
    Regex::Matcher matcher;
    std::deque<std::string> texts;  ///< that steps have made
    std::vector<std::string_view> next;
  };

  PreTokenizer() = default;
  explicit PreTokenizer(std::vector<Step> steps) : steps_(std::move(steps)) {}

  const std::vector<Step>& steps() const { return steps_; }
  /// Sets `words` to the words of a piece of text, views of it or of `scratch`; `first` says that
  /// it stands at the start of the document.
  void run(std::string_view text, bool first, Scratch& scratch,
           std::vector<std::string_view>& words) const;

 private:
  std::vector<Step> steps_;
};

}  // namespace tessera
