#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "data/text/chunk_reader.h"
#include "data/text/json_document.h"
#include "data/text/text_check.h"
#include "tokenizer/tokenizer.h"

namespace tessera {

/// Ids of a chunk that belong to one document and share their loss.
struct EncodedPart {
  int64_t num_tokens = 0;
  bool has_loss = true;
  bool ends_document = false;
  bool is_blank = false;
};

/// What a chunk has become.
struct EncodedChunk {
  std::vector<std::byte> tokens;  ///< see pack_tokens
  std::vector<EncodedPart> parts;
  TextDamage damage;            ///< of text; JSONL is refused where it is no UTF-8
  int64_t text_bytes = 0;       ///< encoded
  uint64_t content_hash = 0;    ///< see hash_chunk
  SkippedLines skipped;         ///< of JSONL
  int64_t blank_documents = 0;  ///< of JSONL, left out
};

/// A hash of the text of a chunk, and of where it ends in its file.
uint64_t hash_chunk(const TextChunk& chunk);

/// Turns chunks into ids. Immutable: any number of threads may use one, which is where the time of
/// tokenizing goes.
class ChunkEncoder {
 public:
  /// All must outlive the encoder.
  ChunkEncoder(const TextSource& source, const std::vector<TextFile>& files,
               const Tokenizer& tokenizer);

  /// Throws UserError with file and place for text that cannot be used.
  EncodedChunk encode(const TextChunk& chunk) const;

 private:
  void encode_text(const TextChunk& chunk, EncodedChunk& encoded) const;
  void encode_lines(const TextChunk& chunk, EncodedChunk& encoded) const;
  void encode_document(const std::vector<DocumentPart>& document, EncodedChunk& encoded) const;
  int64_t append_text(std::string_view text, bool continues, EncodedChunk& encoded) const;
  int64_t append_end(EncodedChunk& encoded) const;

  const TextSource& source_;
  const std::vector<TextFile>& files_;
  const Tokenizer& tokenizer_;
};

}  // namespace tessera
