#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tokenizer/text/normalizer.h"

namespace tessera {

/// A token that is found in text as a whole, before text is split into words.
struct AddedToken {
  std::string content;
  int32_t id = 0;
  bool special = false;
  bool single_word = false;  ///< only where no letter or digit touches it
  bool lstrip = false;       ///< takes the white space before it
  bool rstrip = false;       ///< takes the white space behind it
  bool normalized = false;   ///< searched in normalized text
};

/// Finds which of many texts stands at a place: a trie. Immutable once filled.
class TextFinder {
 public:
  /// Adds a text that is not empty; the first of equal ones counts.
  void add(std::string_view text, int32_t value);
  bool empty() const { return longest_ == 0; }
  size_t longest() const { return longest_; }

  struct Match {
    size_t begin = 0;
    size_t end = 0;
    int32_t value = -1;  ///< -1: none
  };
  /// The leftmost match at `position` or after it, and of those the longest.
  Match find(std::string_view text, size_t position) const;
  /// Whether a text stands anywhere such that it contains, ends or begins at `position`.
  bool touches(std::string_view text, size_t position) const;

 private:
  static constexpr int32_t kNone = -1;

  int32_t child(int32_t node, char byte) const;
  Match longest_at(std::string_view text, size_t position) const;

  std::unordered_map<uint64_t, int32_t> children_;  ///< by node << 8 | byte
  std::vector<int32_t> values_ = {kNone};           ///< of each node
  std::array<bool, 256> starts_{};                  ///< whether a text begins with a byte
  int only_start_ = 0;                              ///< the one byte that all begin with, or -1
  size_t longest_ = 0;
};

/// The added tokens of a tokenizer.
class AddedTokens {
 public:
  /// A piece of a text: a token, or text between tokens where `id` is -1.
  struct Piece {
    std::string_view text;
    int32_t id = -1;
  };

  AddedTokens() = default;
  AddedTokens(std::vector<AddedToken> tokens, const Normalizer& normalizer);

  const std::vector<AddedToken>& all() const { return tokens_; }
  /// Cuts text that is not normalized at the tokens that are searched there, and text that is at
  /// the others.
  void split_raw(std::string_view text, std::vector<Piece>& pieces) const {
    split(text, raw_, pieces);
  }
  void split_normalized(std::string_view text, std::vector<Piece>& pieces) const {
    split(text, normalized_, pieces);
  }
  const TextFinder& raw() const { return raw_; }
  const TextFinder& normalized() const { return normalized_; }

 private:
  void split(std::string_view text, const TextFinder& finder, std::vector<Piece>& pieces) const;

  std::vector<AddedToken> tokens_;
  TextFinder raw_;  ///< values are indices into tokens_
  TextFinder normalized_;
};

}  // namespace tessera
