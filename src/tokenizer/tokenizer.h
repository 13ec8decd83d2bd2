#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// Turns text into token ids and back. Immutable, so any number of threads may use one.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  /// What the tokenizer is, precisely enough that equal names give equal ids; token files record
  /// it.
  virtual std::string name() const = 0;
  /// Ids are in [0, vocab_size).
  virtual int64_t vocab_size() const = 0;
  /// The id that stands between documents; `encode` never gives it.
  virtual int32_t end_of_document() const = 0;
  /// Where a longer text may be cut so that the ids of the two parts are the ids of the whole: in
  /// (0, limit]; 0 < limit < text.size(). Lets a large file be encoded piece by piece.
  virtual size_t cut(std::string_view text, size_t limit) const = 0;
  /// Appends the ids of `text` to `ids`.
  virtual void encode(std::string_view text, std::vector<int32_t>& ids) const = 0;
  /// The bytes of the ids, end_of_document as nothing. A character may be spread over several ids,
  /// so the result for a part of a text need not be valid UTF-8. Throws UserError for an id outside
  /// the vocabulary.
  virtual std::string decode(std::span<const int32_t> ids) const = 0;
};

/// One id a byte, and 256 for the end of a document: a vocabulary of 257 that knows every text.
std::unique_ptr<Tokenizer> make_byte_tokenizer();

/// The tokenizer of that name ("byte"). Throws UserError for an unknown one.
std::unique_ptr<Tokenizer> make_tokenizer(const std::string& name);

}  // namespace tessera
