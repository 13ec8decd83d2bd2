#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "tokenizer/tokenizer.h"

namespace tessera {

/// A SentencePiece .model, opened by its library. Move-only.
class SentencePieceModel {
 public:
  /// Throws UserError that begins with `where` for bytes that are no model or one that is not
  /// supported.
  SentencePieceModel(std::string bytes, const std::string& where);
  SentencePieceModel(SentencePieceModel&&) noexcept;
  ~SentencePieceModel();

  int64_t vocab_size() const;
  /// The id of the piece that ends a sentence, or -1.
  int32_t end_of_sentence() const;
  /// The id of a piece, or -1.
  int32_t find(std::string_view piece) const;

 private:
  friend std::unique_ptr<Tokenizer> make_sentencepiece_tokenizer(SentencePieceModel model,
                                                                 int32_t end_of_document);
  friend class SentencePieceTokenizer;
  struct State;

  void load(const std::string& bytes);

  std::unique_ptr<State> state_;
};

/// The tokenizer of a model; documents are separated by the piece of that id.
std::unique_ptr<Tokenizer> make_sentencepiece_tokenizer(SentencePieceModel model,
                                                        int32_t end_of_document);

}  // namespace tessera
