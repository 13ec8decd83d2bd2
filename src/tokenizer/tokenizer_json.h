#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/added_tokens.h"
#include "tokenizer/bpe.h"
#include "tokenizer/text/normalizer.h"
#include "tokenizer/text/pre_tokenizer.h"

namespace tessera {

/// How ids become text again.
struct TokenDecoder {
  bool byte_level = true;  ///< letters stand for bytes
  /// Texts within a token that stand for others.
  std::vector<std::pair<std::string, std::string>> replacements;
  bool byte_fallback = false;  ///< "<0x0A>" is a byte
  std::string strip;           ///< taken from the start of the whole text ...
  int64_t num_strip = 0;       ///< ... this often at most
  std::string drop_mark;       ///< not empty: taken out of the first token wherever it stands
};

/// What a tokenizer.json says, as far as it concerns ids without special tokens and text.
struct TokenizerDescription {
  std::string source;  ///< the path, for messages
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  BpeDescription model;
  /// Texts of the model's tokens in the file's own letters, by id; empty: no token.
  std::vector<std::string> tokens;
  std::vector<AddedToken> added;
  TokenDecoder decoder;
  bool cuts_at_lines = false;   ///< a line end between two words ends a word, whatever surrounds it
  bool cuts_at_spaces = false;  ///< so does the place before a space between two letters
  uint64_t hash = 0;            ///< of all that decides ids
};

/// Reads a tokenizer.json. Throws UserError that begins with `where` for a file that is damaged or
/// asks for what is not supported, by name.
TokenizerDescription parse_tokenizer_json(std::string_view text, std::string_view where);

/// The bytes that a token of a byte-level encoding stands for; false where one of its letters
/// stands for none, as in most special tokens.
bool decode_byte_letters(std::string_view token, std::string& bytes);
/// The letters that stand for bytes.
std::string encode_byte_letters(std::string_view bytes);

}  // namespace tessera
