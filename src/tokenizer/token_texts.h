#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tokenizer/tokenizer_json.h"

namespace tessera {

/// The bytes that ids stand for. Where the package would write U+FFFD for bytes that are not UTF-8,
/// the bytes themselves are kept.
class TokenTexts {
 public:
  /// `tokens` by id; added ones replace those of their ids.
  TokenTexts(const std::vector<std::string>& tokens, const std::vector<AddedToken>& added,
             const Normalizer& normalizer, const TokenDecoder& decoder);

  /// Ids are below it; one that no token has is nothing.
  int64_t size() const { return static_cast<int64_t>(texts_.size()); }
  /// `from_start`: what the decoder takes from the start of a text is taken.
  std::string decode(std::span<const int32_t> ids, bool from_start) const;

 private:
  std::string take_start(std::string text) const;

  std::vector<std::string> texts_;
  std::vector<std::string> first_texts_;  ///< of the first token, where that differs; else empty
  std::string strip_;
  int64_t num_strip_ = 0;
};

}  // namespace tessera
