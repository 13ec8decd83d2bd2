#include "tokenizer/text/pre_tokenizer.h"

#include <algorithm>
#include <functional>

#include "core/text/utf8.h"
#include "tokenizer/text/normalizer.h"
#include "tokenizer/text/unicode.h"

namespace tessera {
namespace {

/// A part of a piece: a match of the step, or text between two.
struct Part {
  size_t begin = 0;
  size_t end = 0;
  bool match = false;
};

class Splitting {
 public:
  Splitting(std::string_view text, std::vector<std::string_view>& words)
      : text_(text), words_(words) {}

  /// Adds a match, and the text between the one before and it.
  void add_match(size_t begin, size_t end) {
    if (begin > done_) parts_.push_back({done_, begin, false});
    parts_.push_back({begin, end, true});
    done_ = end;
  }

  void finish(SplitBehavior behavior, bool invert) {
    if (done_ < text_.size()) parts_.push_back({done_, text_.size(), false});
    for (Part& part : parts_) part.match ^= invert;
    if (behavior == SplitBehavior::kMergedWithNext) {
      merge_with_next();
    } else {
      merge_forward(behavior);
    }
  }

 private:
  void emit(size_t begin, size_t end) {
    if (begin < end) words_.push_back(text_.substr(begin, end - begin));
  }

  void merge_forward(SplitBehavior behavior) {
    size_t begin = 0;
    bool previous = false;
    for (size_t i = 0; i < parts_.size(); ++i) {
      const Part& part = parts_[i];
      const bool removed = behavior == SplitBehavior::kRemoved && part.match;
      const bool joined =
          i > 0 && ((behavior == SplitBehavior::kContiguous && part.match == previous) ||
                    (behavior == SplitBehavior::kMergedWithPrevious && part.match && !previous));
      if (!joined && i > 0) emit(begin, part.begin);
      if (!joined) begin = part.begin;
      if (removed) begin = part.end;
      previous = part.match;
    }
    emit(begin, text_.size());
  }

  void merge_with_next() {
    size_t begin = 0;
    for (size_t i = 0; i < parts_.size(); ++i) {
      const bool joined = i > 0 && parts_[i - 1].match && !parts_[i].match;
      if (joined) continue;
      emit(begin, parts_[i].begin);
      begin = parts_[i].begin;
    }
    emit(begin, text_.size());
  }

  std::string_view text_;
  std::vector<std::string_view>& words_;
  std::vector<Part> parts_;
  size_t done_ = 0;
};

/// Matches within what is valid UTF-8; bytes that are not match nothing.
void find_matches(const Regex& regex, std::string_view text, Regex::Matcher& matcher,
                  Splitting& splitting) {
  size_t begin = 0;
  while (begin < text.size()) {
    const size_t size = valid_utf8_prefix(text.substr(begin));
    const std::string_view valid = text.substr(begin, size);
    for (size_t position = 0; position < size;) {
      const auto found = matcher.find(regex, valid, position);
      if (!found) break;
      splitting.add_match(begin + found->first, begin + found->second);
      position = found->second;
    }
    begin += size + 1;
  }
}

void split_words(const WordSplitter& splitter, std::string_view text,
                 std::vector<std::string_view>& words) {
  for (size_t position = 0; position < text.size();) {
    const size_t end = splitter.next(text, position);
    words.push_back(text.substr(position, end - position));
    position = end;
  }
}

void apply(const RegexSplit& step, std::string_view text, PreTokenizer::Scratch& scratch,
           std::vector<std::string_view>& words) {
  if (step.known) return split_words(*step.known, text, words);
  Splitting splitting(text, words);
  find_matches(*step.regex, text, scratch.matcher, splitting);
  splitting.finish(step.behavior, step.invert);
}

void apply(const DigitSplit& step, std::string_view text, std::vector<std::string_view>& words) {
  Splitting splitting(text, words);
  for (size_t position = 0; position < text.size();) {
    const Character character = decode_character(text, position);
    const size_t end = position + character.num_bytes;
    if (character_class(character) == CharacterClass::kNumber) splitting.add_match(position, end);
    position = end;
  }
  splitting.finish(step.individual ? SplitBehavior::kIsolated : SplitBehavior::kContiguous, false);
}

void apply(const SpacePrefix&, std::string_view text, PreTokenizer::Scratch& scratch,
           std::vector<std::string_view>& words) {
  if (text.starts_with(' ')) return words.push_back(text);
  words.push_back(scratch.texts.emplace_back(" " + std::string(text)));
}

void apply(const MarkSpaces& step, std::string_view text, bool first,
           PreTokenizer::Scratch& scratch, std::vector<std::string_view>& words) {
  const Normalizer replace({{NormalizerStep::Kind::kReplace, " ", step.mark}});
  std::string buffer;
  std::string marked(replace.apply(text, buffer));
  const bool wanted = step.prepend == MarkSpaces::Prepend::kAlways ||
                      (step.prepend == MarkSpaces::Prepend::kFirst && first);
  if (wanted && !marked.starts_with(step.mark)) marked.insert(0, step.mark);
  const std::string_view kept = scratch.texts.emplace_back(std::move(marked));
  if (!step.split) return words.push_back(kept);
  Splitting splitting(kept, words);
  for (size_t at = kept.find(step.mark); at != kept.npos;
       at = kept.find(step.mark, at + step.mark.size())) {
    splitting.add_match(at, at + step.mark.size());
  }
  splitting.finish(SplitBehavior::kMergedWithNext, false);
}

}  // namespace

void PreTokenizer::run(std::string_view text, bool first, Scratch& scratch,
                       std::vector<std::string_view>& words) const {
  words.clear();
  scratch.texts.clear();
  if (text.empty()) return;
  words.push_back(text);
  for (const Step& step : steps_) {
    scratch.next.clear();
    for (size_t i = 0; i < words.size(); ++i) {
      if (step.regex) apply(*step.regex, words[i], scratch, scratch.next);
      if (step.digits) apply(*step.digits, words[i], scratch.next);
      if (step.prefix) apply(*step.prefix, words[i], scratch, scratch.next);
      if (step.mark) apply(*step.mark, words[i], first && i == 0, scratch, scratch.next);
    }
    words.swap(scratch.next);
  }
}

}  // namespace tessera
