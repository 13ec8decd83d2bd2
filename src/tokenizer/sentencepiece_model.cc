#include "tokenizer/sentencepiece_model.h"

#include <cstring>
#include <limits>

#include "core/error.h"
#include "core/text/utf8.h"

namespace tessera {
namespace {

/// Reads the fields of one message of a protocol buffer.
class MessageReader {
 public:
  struct Field {
    uint64_t number = 0;
    uint64_t value = 0;      ///< of an integer
    std::string_view bytes;  ///< of a string or message
  };

  MessageReader(std::string_view bytes, std::string_view where) : bytes_(bytes), where_(where) {}

  /// False at the end.
  bool next(Field& field) {
    if (bytes_.empty()) return false;
    const uint64_t tag = varint();
    field = {.number = tag >> 3};
    switch (tag & 7) {
      case 0:
        field.value = varint();
        break;
      case 1:
        take(8);
        break;
      case 2:
        field.bytes = take(varint());
        break;
      case 5:
        take(4);
        break;
      default:
        fail();
    }
    if (field.number == 0) fail();
    return true;
  }

 private:
  [[noreturn]] void fail() const { user_error("{} is no SentencePiece model, or damaged", where_); }

  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      if (bytes_.empty()) fail();
      const auto byte = static_cast<uint8_t>(take(1)[0]);
      value |= static_cast<uint64_t>(byte & 0x7F) << shift;
      if (byte < 0x80) return value;
    }
    fail();
  }

  std::string_view take(uint64_t size) {
    if (size > bytes_.size()) fail();
    const std::string_view taken = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return taken;
  }

  std::string_view bytes_;
  std::string_view where_;
};

SentencePieceSettings::Piece read_piece(std::string_view bytes, std::string_view where) {
  SentencePieceSettings::Piece piece;
  MessageReader reader(bytes, where);
  for (MessageReader::Field field; reader.next(field);) {
    if (field.number == 1) piece.text = field.bytes;
    if (field.number != 3) continue;
    require(field.value >= 1 && field.value <= 6, "{}: a piece has the unknown type {}", where,
            field.value);
    piece.type = static_cast<SentencePieceSettings::Type>(field.value);
  }
  require(!piece.text.empty() && valid_utf8_prefix(piece.text) == piece.text.size() &&
              piece.text.find('\0') == std::string::npos,
          "{}: a piece is empty, not UTF-8, or has a NUL", where);
  return piece;
}

void read_trainer(std::string_view bytes, SentencePieceSettings& settings, std::string_view where) {
  MessageReader reader(bytes, where);
  for (MessageReader::Field field; reader.next(field);) {
    if (field.number == 3) settings.model_type = static_cast<int64_t>(field.value);
    if (field.number == 24) settings.whitespace_as_suffix = field.value != 0;
    if (field.number == 44) settings.unknown_surface = field.bytes;
  }
}

void read_normalizer(std::string_view bytes, SentencePieceSettings& settings,
                     std::string_view where) {
  MessageReader reader(bytes, where);
  for (MessageReader::Field field; reader.next(field);) {
    if (field.number == 1) settings.normalizer = field.bytes;
    if (field.number == 2) settings.normalizer_map = field.bytes;
    if (field.number == 3) settings.add_dummy_prefix = field.value != 0;
    if (field.number == 4) settings.remove_extra_whitespaces = field.value != 0;
    if (field.number == 5) settings.escape_whitespaces = field.value != 0;
  }
}

bool has_map(std::string_view bytes, std::string_view where) {
  SentencePieceSettings settings;
  read_normalizer(bytes, settings, where);
  return !settings.normalizer_map.empty();
}

uint32_t read_u32(std::string_view bytes, size_t offset) {
  uint32_t value = 0;
  std::memcpy(&value, bytes.data() + offset, sizeof(value));
  return value;
}

/// The map is a double array (Darts: bit 31 marks a value, bit 8 that one follows, the rest is the
/// way to the children) and the texts that its values point to, each ended by a zero.
void validate_map(std::string_view map, std::string_view where) {
  const auto check = [where](bool ok) {
    require(ok, "{}: the normalizer's map points outside itself", where);
  };
  if (map.empty()) return;
  const size_t trie_bytes = map.size() < 4 ? 0 : read_u32(map, 0);
  check(map.size() > 4 && trie_bytes <= map.size() - 4 && trie_bytes >= 1024 &&
        trie_bytes % 4 == 0 && map.back() == '\0');
  const size_t num_units = trie_bytes / 4;
  const size_t num_text_bytes = map.size() - 4 - trie_bytes;
  for (size_t i = 0; i < num_units; ++i) {
    const uint32_t unit = read_u32(map, 4 + i * 4);
    if ((unit & 0x80000000U) != 0) {
      check((unit & 0x7FFFFFFFU) < num_text_bytes);
      continue;
    }
    const size_t child = i ^ (static_cast<size_t>(unit >> 10) << ((unit & 0x200U) >> 6));
    check((child | 0xFF) < num_units);
  }
}

}  // namespace

SentencePieceSettings parse_sentencepiece_settings(std::string_view bytes, std::string_view where) {
  SentencePieceSettings settings;
  MessageReader reader(bytes, where);
  for (MessageReader::Field field; reader.next(field);) {
    if (field.number == 1) settings.pieces.push_back(read_piece(field.bytes, where));
    if (field.number == 2) read_trainer(field.bytes, settings, where);
    if (field.number == 3) read_normalizer(field.bytes, settings, where);
    if (field.number == 5) settings.has_denormalizer |= has_map(field.bytes, where);
  }
  require(!settings.pieces.empty(), "{} is no SentencePiece model: it has no pieces", where);
  validate_map(settings.normalizer_map, where);
  return settings;
}

}  // namespace tessera
