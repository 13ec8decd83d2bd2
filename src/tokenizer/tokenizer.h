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
  /// The id that stands between documents. `encode` gives it only where the text itself spells out
  /// the special token.
  virtual int32_t end_of_document() const = 0;
  /// Where a longer text may be cut so that `encode` of the first part followed by
  /// `encode_continuation` of the rest gives the ids of the whole: the largest such place in (0,
  /// limit], else the smallest after it, else text.size(); 0 < limit < text.size().
  virtual size_t cut(std::string_view text, size_t limit) const = 0;
  /// Appends the ids of `text` to `ids`. No token that marks the start or end of a sequence is
  /// added. Throws UserError where the text cannot be encoded.
  virtual void encode(std::string_view text, std::vector<int32_t>& ids) const = 0;
  /// As `encode`, of a text that follows another one from which `cut` has cut it.
  virtual void encode_continuation(std::string_view text, std::vector<int32_t>& ids) const {
    encode(text, ids);
  }
  /// The bytes of the ids; a special token gives its text, one without text nothing. A character
  /// may be spread over several ids, so the result for a part of a text need not be valid UTF-8.
  /// Throws UserError for an id outside the vocabulary.
  virtual std::string decode(std::span<const int32_t> ids) const = 0;
  /// As `decode`, of ids that follow others: keeps the space that some tokenizers take from the
  /// start of a text.
  virtual std::string decode_continuation(std::span<const int32_t> ids) const {
    return decode(ids);
  }
};

/// One id a byte, and 256 for the end of a document: a vocabulary of 257 that knows every text.
std::unique_ptr<Tokenizer> make_byte_tokenizer();

/// Stands for a tokenizer that is not there, of a model that came without one: its vocabulary is
/// empty, ids give no text, and encoding throws UserError.
std::unique_ptr<Tokenizer> make_no_tokenizer();

/// Which tokenizer, as a user says it.
struct TokenizerSpec {
  /// "byte", "none" (see make_no_tokenizer), a tokenizer.json, a SentencePiece .model, or a folder
  /// that holds tokenizer.json or tokenizer.model.
  std::string path = "byte";
  /// The token between documents, as its text or its id. Empty: the eos_token of
  /// tokenizer_config.json beside the file, else the file's own, else a well-known one.
  std::string end_of_document;
};

/// Opens a tokenizer. Throws UserError for one that is missing, damaged, or asks for something that
/// is not supported, and where no token can stand between documents.
std::unique_ptr<Tokenizer> make_tokenizer(const TokenizerSpec& spec);

}  // namespace tessera
