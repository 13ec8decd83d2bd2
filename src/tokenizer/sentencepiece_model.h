#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// What Tessera itself must know of a SentencePiece .model, read from its protocol buffer
/// (sentencepiece_model.proto).
struct SentencePieceSettings {
  enum class Type { kNormal = 1, kUnknown, kControl, kUserDefined, kUnused, kByte };
  struct Piece {
    std::string text;
    Type type = Type::kNormal;
  };
  std::vector<Piece> pieces;
  int64_t model_type = 1;  ///< 1 unigram, 2 BPE, 3 word, 4 character
  bool whitespace_as_suffix = false;
  std::string unknown_surface = " \xE2\x81\x87 ";
  std::string normalizer;  ///< "identity", "nmt_nfkc", ...
  std::string normalizer_map;
  bool add_dummy_prefix = true;
  bool remove_extra_whitespaces = true;
  bool escape_whitespaces = true;
  bool has_denormalizer = false;
};

/// Throws UserError that begins with `where` for bytes that are no such model, and for one whose
/// tables point outside themselves, which the library would follow.
SentencePieceSettings parse_sentencepiece_settings(std::string_view bytes, std::string_view where);

}  // namespace tessera
