#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tokenizer/pair_table.h"

namespace tessera {

/// A byte-pair encoding as a file tells it. Texts of tokens are what `encode_word` sees: bytes for
/// a byte-level encoding, not the letters that stand for them in the file.
struct BpeDescription {
  std::vector<std::pair<std::string, int32_t>> vocabulary;
  std::vector<std::pair<std::string, std::string>> merges;  ///< first ones first
  std::optional<std::string> unknown;                       ///< for characters without a token
  bool fuse_unknown = false;                                ///< one token for several in a row
  bool byte_fallback = false;  ///< characters without a token become "<0x0A>" tokens
  bool ignore_merges = false;  ///< a word that is a token is that token
  bool byte_level = true;      ///< words start as bytes, not as characters
};

/// Byte-pair encoding of words (Sennrich, Haddow and Birch, "Neural Machine Translation of Rare
/// Words with Subword Units", 2016): starts with single bytes or characters and joins neighbours,
/// the pair that was learned first before others, the leftmost first. Immutable.
class BpeModel {
 public:
  /// Memory for encoding, to be kept from one word to the next.
  struct Scratch {
    struct Symbol {
      int32_t id = 0;
      int32_t previous = -1;  ///< index of the neighbours that are left, or -1
      int32_t next = -1;
      bool merged = false;  ///< into the one before it
    };
    struct Candidate {
      uint32_t rank = 0;
      int32_t position = 0;
      int32_t id = 0;  ///< of the pair joined
    };
    std::vector<int32_t> ids;
    std::vector<uint32_t> ranks;
    std::vector<Symbol> symbols;
    std::vector<Candidate> heap;
  };

  /// Throws UserError that begins with `where` for tokens that appear twice or are missing.
  BpeModel(const BpeDescription& description, std::string_view where);

  /// Appends the ids of a word.
  void encode_word(std::string_view word, Scratch& scratch, std::vector<int32_t>& ids) const;
  /// The id of a token, or -1.
  int32_t find(std::string_view token) const;

 private:
  void add_merges(const BpeDescription& description, std::string_view where);
  void split(std::string_view word, std::vector<int32_t>& ids) const;
  int32_t first_token(std::string_view character) const;
  bool add_bytes(std::string_view character, std::vector<int32_t>& ids) const;
  void merge_short(Scratch& scratch) const;
  void merge_long(Scratch& scratch) const;
  void push_candidate(Scratch& scratch, int32_t position) const;

  struct TextHash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };
  std::unordered_map<std::string, int32_t, TextHash, std::equal_to<>> ids_;
  PairTable merges_;
  std::vector<int32_t> byte_ids_;      ///< of single bytes where byte_level_; -1: none
  std::vector<int32_t> fallback_ids_;  ///< of "<0x00>" ... "<0xFF>"; -1: none
  std::optional<std::string> unknown_text_;
  int32_t unknown_ = -1;
  bool fuse_unknown_ = false;
  bool byte_fallback_ = false;
  bool ignore_merges_ = false;
  bool byte_level_ = true;
};

}  // namespace tessera
