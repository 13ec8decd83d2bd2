#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "tokenizer/added_tokens.h"
#include "tokenizer/text/normalizer.h"
#include "tokenizer/tokenizer_json.h"

namespace tessera {

/// Where text may be cut without a change to its ids.
struct CutRules {
  /// Behind a line end that follows no white space and precedes a letter or number.
  bool at_lines = false;
  /// Before a space between two letters of ASCII.
  bool at_spaces = false;
  /// Not empty: words that are whole texts may be cut before a mark that no mark precedes.
  std::string mark;
  /// A normalizer or pre-tokenizer puts something before the text; a continuation leaves out its
  /// space instead.
  bool drop_space = false;
};

/// The rules for a tokenizer, as far as they can be proven from what its file says: merges that
/// never cross a mark, expressions that are known.
CutRules cut_rules(const TokenizerDescription& description, const Normalizer& normalizer,
                   const PreTokenizer& pre_tokenizer, const BpeModel& model);

/// Finds places to cut at. The normalizer and the added tokens must outlive it.
class CutFinder {
 public:
  CutFinder(const Normalizer& normalizer, const AddedTokens& added, CutRules rules);

  /// As Tokenizer::cut.
  size_t cut(std::string_view text, size_t limit) const;
  /// What to encode for a text that begins at a cut.
  std::string_view continuation(std::string_view text) const {
    return rules_.drop_space && text.starts_with(' ') ? text.substr(1) : text;
  }
  /// Calls `function` with the parts of a word that merge independently of one another.
  template <typename Function>
  void for_each_part(std::string_view word, const Function& function) const {
    if (rules_.mark.empty()) return function(word);
    while (!word.empty()) {
      const size_t size = part_size(word);
      function(word.substr(0, size));
      word.remove_prefix(size);
    }
  }

 private:
  bool is_cut(std::string_view text, size_t position) const;
  bool is_boundary(std::string_view text, size_t position) const;
  bool touches_normalized(std::string_view text, size_t position) const;
  size_t part_size(std::string_view word) const;

  const Normalizer& normalizer_;
  const AddedTokens& added_;
  CutRules rules_;
};

}  // namespace tessera
