#pragma once

#include <string>
#include <vector>

#include "tokenizer/tokenizer.h"
#include "train/infer/decoding_batch.h"

namespace tessera {

/// Part of a text that is final, with the tokens it ends in.
struct TextPiece {
  std::string text;  ///< valid UTF-8
  std::vector<DecodedToken> tokens;
  std::vector<int64_t> offsets;  ///< bytes of the written text before each of the tokens
};

/// The text of one choice as its tokens come. What may be part of a character or of a stop string
/// is kept back until that is known, so that the pieces of a stream make up the text that is given
/// as a whole. Bytes that are no character become U+FFFD.
class WrittenText {
 public:
  WrittenText(const Tokenizer& tokenizer, std::vector<std::string> stop)
      : tokenizer_(tokenizer), stop_(std::move(stop)) {}

  /// Gives what has become final. Nothing more is taken once it stopped.
  TextPiece add(const DecodedToken& token);
  /// The rest, where no more tokens come.
  TextPiece finish();
  /// Whether a stop string came: the text ends before it.
  bool stopped() const { return stopped_; }

 private:
  TextPiece release(size_t end, bool all);
  size_t find_stop() const;
  size_t settled() const;

  const Tokenizer& tokenizer_;
  std::vector<std::string> stop_;
  std::string bytes_;    ///< all that was written
  size_t released_ = 0;  ///< bytes of it that were given
  std::vector<DecodedToken> tokens_;
  std::vector<int64_t> offsets_;
  bool stopped_ = false;
};

/// Text whose bytes that are no UTF-8 have become U+FFFD.
std::string to_valid_utf8(const std::string& text);

}  // namespace tessera
