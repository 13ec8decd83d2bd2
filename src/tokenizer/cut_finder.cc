#include "tokenizer/cut_finder.h"

#include <algorithm>
#include <utility>

#include "core/text/utf8.h"
#include "tokenizer/text/unicode.h"

namespace tessera {
namespace {

using Kind = NormalizerStep::Kind;

bool is_ascii_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

/// What a space becomes, if the text is otherwise left alone: the mark of SentencePiece.
std::string space_mark(const Normalizer& normalizer, const PreTokenizer& pre_tokenizer) {
  std::string mark;
  for (const NormalizerStep& step : normalizer.steps()) {
    if (step.kind == Kind::kReplace && step.pattern == " ") mark = step.content;
  }
  for (const PreTokenizer::Step& step : pre_tokenizer.steps()) {
    if (step.mark) mark = step.mark->mark;
  }
  return mark;
}

/// Whether some merge joins a token that does not end in the mark with one that begins with it.
bool joins_before(const BpeDescription& model, const std::string& mark) {
  return std::ranges::any_of(model.merges, [&](const auto& merge) {
    return merge.second.starts_with(mark) && !merge.first.ends_with(mark);
  });
}

/// Normalizers that change each character for itself, except for what is put before the text.
bool cuttable(const Normalizer& normalizer) {
  return std::ranges::all_of(normalizer.steps(), [](const NormalizerStep& step) {
    return step.kind != Kind::kReplace || step.pattern == " ";
  });
}

bool has_prepend(const Normalizer& normalizer) {
  return std::ranges::any_of(
      normalizer.steps(), [](const NormalizerStep& step) { return step.kind == Kind::kPrepend; });
}

/// Whether leaving out the space that a continuation begins with has the effect of putting the
/// prefix before it: Prepend of the mark, then Replace of spaces by it, and nothing else.
bool prefix_replaces_space(const Normalizer& normalizer, const std::string& mark) {
  const auto& steps = normalizer.steps();
  return steps.size() == 2 && steps[0].kind == Kind::kPrepend && steps[0].content == mark &&
         steps[1].kind == Kind::kReplace && steps[1].pattern == " " && steps[1].content == mark;
}

}  // namespace

CutRules cut_rules(const TokenizerDescription& description, const Normalizer& normalizer,
                   const PreTokenizer& pre_tokenizer, const BpeModel& model) {
  CutRules rules;
  if (description.model.byte_level) {
    const bool plain = cuttable(normalizer) && !has_prepend(normalizer) &&
                       space_mark(normalizer, pre_tokenizer).empty();
    rules.at_lines = plain && description.cuts_at_lines;
    rules.at_spaces = plain && description.cuts_at_spaces;
    return rules;
  }
  const std::string mark = space_mark(normalizer, pre_tokenizer);
  const bool splits = !mark.empty() && model.find(mark) >= 0 && !description.model.ignore_merges &&
                      !joins_before(description.model, mark);
  if (!splits) return rules;
  rules.mark = mark;
  const auto& steps = pre_tokenizer.steps();
  const bool only_marks = steps.empty() || (steps.size() == 1 && steps[0].mark);
  rules.drop_space = steps.empty() && prefix_replaces_space(normalizer, mark);
  rules.at_spaces =
      only_marks && cuttable(normalizer) && (rules.drop_space || !has_prepend(normalizer));
  return rules;
}

CutFinder::CutFinder(const Normalizer& normalizer, const AddedTokens& added, CutRules rules)
    : normalizer_(normalizer), added_(added), rules_(std::move(rules)) {}

size_t CutFinder::cut(std::string_view text, size_t limit) const {
  if (!rules_.at_lines && !rules_.at_spaces) return text.size();
  for (size_t position = limit; position > 0; --position) {
    if (is_cut(text, position)) return position;
  }
  for (size_t position = limit + 1; position < text.size(); ++position) {
    if (is_cut(text, position)) return position;
  }
  return text.size();
}

bool CutFinder::is_cut(std::string_view text, size_t position) const {
  return is_boundary(text, position) && !added_.raw().touches(text, position) &&
         !touches_normalized(text, position);
}

bool CutFinder::is_boundary(std::string_view text, size_t position) const {
  if (rules_.at_spaces && text[position] == ' ') {
    return position + 1 < text.size() && is_ascii_letter(text[position - 1]) &&
           is_ascii_letter(text[position + 1]);
  }
  if (!rules_.at_lines || text[position - 1] != '\n' || position < 2) return false;
  const CharacterClass before = character_class(decode_character_before(text, position - 1));
  const CharacterClass after = character_class(decode_character(text, position));
  return before != CharacterClass::kSpace &&
         (after == CharacterClass::kLetter || after == CharacterClass::kNumber);
}

/// Tokens that are searched in normalized text: near them, only plain ASCII is cut, where all that
/// normalizing does is to replace spaces.
bool CutFinder::touches_normalized(std::string_view text, size_t position) const {
  const TextFinder& finder = added_.normalized();
  if (finder.empty()) return false;
  if (normalizer_.steps().empty()) return finder.touches(text, position);
  const size_t first = position - std::min(position, finder.longest());
  const std::string_view before = text.substr(first, position - first);
  const std::string_view after = text.substr(position, finder.longest());
  if (!is_ascii(before) || !is_ascii(after)) return true;
  std::vector<NormalizerStep> steps = normalizer_.steps();
  std::erase_if(steps, [](const NormalizerStep& step) { return step.kind == Kind::kPrepend; });
  const Normalizer inner(std::move(steps));
  std::string buffer;
  std::string normalized(inner.apply(before, buffer));
  const size_t middle = normalized.size();
  normalized += inner.apply(after, buffer);
  return finder.touches(normalized, middle);
}

/// Up to the first mark behind something else.
size_t CutFinder::part_size(std::string_view word) const {
  const std::string_view mark = rules_.mark;
  size_t position = 0;
  while (word.substr(position).starts_with(mark)) position += mark.size();
  return std::min(word.find(mark, position), word.size());
}

}  // namespace tessera
