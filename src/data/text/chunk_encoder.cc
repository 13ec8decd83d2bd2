#include "data/text/chunk_encoder.h"

#include <algorithm>

#include "core/error.h"
#include "core/file/hash.h"
#include "core/random.h"
#include "data/text/json_document.h"
#include "data/token_file_writer.h"

namespace tessera {
namespace {

/// Text is encoded in pieces of this size, so that memory does not grow with the documents.
constexpr size_t kPieceBytes = 1 << 20;

}  // namespace

ChunkEncoder::ChunkEncoder(const TextSource& source, const std::vector<TextFile>& files,
                           const Tokenizer& tokenizer)
    : source_(source), files_(files), tokenizer_(tokenizer) {}

uint64_t hash_chunk(const TextChunk& chunk) {
  return mix(hash64(chunk.text), static_cast<uint64_t>(chunk.content_bytes));
}

EncodedChunk ChunkEncoder::encode(const TextChunk& chunk) const {
  EncodedChunk encoded;
  encoded.content_hash = hash_chunk(chunk);
  if (files_[chunk.begin.file].is_jsonl) {
    encode_lines(chunk, encoded);
  } else {
    encode_text(chunk, encoded);
  }
  return encoded;
}

int64_t ChunkEncoder::append_text(std::string_view text, bool continues,
                                  EncodedChunk& encoded) const {
  encoded.text_bytes += static_cast<int64_t>(text.size());
  std::vector<int32_t> ids;
  int64_t count = 0;
  while (!text.empty()) {
    const size_t size = text.size() > kPieceBytes ? tokenizer_.cut(text, kPieceBytes) : text.size();
    ids.clear();
    if (continues) {
      tokenizer_.encode_continuation(text.substr(0, size), ids);
    } else {
      tokenizer_.encode(text.substr(0, size), ids);
    }
    continues = true;
    pack_tokens(ids, tokenizer_.vocab_size(), encoded.tokens);
    count += static_cast<int64_t>(ids.size());
    text.remove_prefix(size);
  }
  return count;
}

int64_t ChunkEncoder::append_end(EncodedChunk& encoded) const {
  const int32_t end = tokenizer_.end_of_document();
  pack_tokens({&end, 1}, tokenizer_.vocab_size(), encoded.tokens);
  return 1;
}

void ChunkEncoder::encode_text(const TextChunk& chunk, EncodedChunk& encoded) const {
  encoded.damage = check_text(chunk.text, files_[chunk.begin.file].path, chunk.begin.offset);
  for (const TextPart& part : chunk.parts) {
    const std::string_view text =
        std::string_view(chunk.text).substr(part.begin, part.end - part.begin);
    EncodedPart& out = encoded.parts.emplace_back();
    out.ends_document = part.ends_document;
    out.is_blank = is_blank(text);
    try {
      out.num_tokens = append_text(text, part.continues, encoded);
    } catch (const UserError& error) {
      user_error("{}: {}", files_[chunk.begin.file].path.string(), error.what());
    }
    if (part.ends_document) out.num_tokens += append_end(encoded);
  }
}

void ChunkEncoder::encode_lines(const TextChunk& chunk, EncodedChunk& encoded) const {
  encoded.skipped = for_each_json_document(
      chunk, files_[chunk.begin.file].path, source_,
      [&](const std::vector<DocumentPart>& document) { encode_document(document, encoded); });
}

void ChunkEncoder::encode_document(const std::vector<DocumentPart>& document,
                                   EncodedChunk& encoded) const {
  const bool blank =
      std::ranges::all_of(document, [](const DocumentPart& part) { return is_blank(part.text); });
  if (blank) {
    ++encoded.blank_documents;
    return;
  }
  // A document that cannot be encoded must leave nothing behind where such lines are skipped.
  EncodedChunk alone;
  for (const DocumentPart& part : document) {
    EncodedPart& out = alone.parts.emplace_back();
    out.has_loss = part.has_loss;
    out.num_tokens = append_text(part.text, alone.parts.size() > 1, alone);
    if (part.ends_turn) out.num_tokens += append_end(alone);
  }
  alone.parts.back().ends_document = true;
  encoded.tokens.insert(encoded.tokens.end(), alone.tokens.begin(), alone.tokens.end());
  encoded.parts.insert(encoded.parts.end(), alone.parts.begin(), alone.parts.end());
  encoded.text_bytes += alone.text_bytes;
}

}  // namespace tessera
