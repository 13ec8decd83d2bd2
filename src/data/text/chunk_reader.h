#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/text/byte_source.h"
#include "data/text/text_source.h"

namespace tessera {

/// A place between two chunks of a source; reading goes on from it exactly.
struct TextPosition {
  int64_t file = 0;          ///< index in the list of files
  int64_t offset = 0;        ///< bytes of its content, decompressed, that lie before
  int64_t line = 0;          ///< JSONL: lines that lie before
  bool at_line = true;       ///< text: at the begin of a line
  bool in_document = false;  ///< text: in the middle of a document
  bool operator==(const TextPosition&) const = default;
};

/// A stretch of a chunk that belongs to one document.
struct TextPart {
  size_t begin = 0;
  size_t end = 0;
  bool ends_document = false;
  bool continues = false;  ///< the document has begun before
};

/// Some of a file's content: of text, parts of documents; of JSONL, whole lines.
struct TextChunk {
  TextPosition begin;
  TextPosition end;  ///< of the next file once this one has ended
  std::string text;
  std::vector<TextPart> parts;  ///< of text, in order; empty for JSONL
  int64_t file_position = 0;    ///< bytes of the file taken, as they lie on the disk
  int64_t content_bytes = 0;    ///< of the file up to the chunk's end
  bool ends_file = false;
  bool too_long = false;  ///< the first piece of one line of JSONL that exceeds the limit
};

/// Where a text may be cut near `limit`, see Tokenizer::cut.
using CutText = std::function<size_t(std::string_view text, size_t limit)>;

struct ChunkOptions {
  size_t chunk_bytes = size_t{1} << 20;
  /// How far behind a chunk's end is looked for the end of its last line.
  size_t lookahead_bytes = size_t{1} << 16;
  /// The longest line of JSONL, which is held in memory.
  size_t max_line_bytes = size_t{1} << 28;
};

/// Reads the files of a source chunk by chunk, in memory of a few chunks: a document of any length
/// comes in several, cut where `cut` says. What a chunk holds depends on where it begins and on
/// nothing else, so reading from a remembered position gives the chunks of an unbroken reading.
class ChunkReader {
 public:
  /// `source` supplies the separator; `files` are from list_text_files and must outlive the reader.
  ChunkReader(const TextSource& source, const std::vector<TextFile>& files, CutText cut,
              const ChunkOptions& options = {});

  /// Goes on from there.
  void seek(const TextPosition& position);
  /// The next chunk, or nothing at the end of the last file.
  std::optional<TextChunk> next();

 private:
  void open();
  void fill(size_t num_bytes);
  TextChunk take_text();
  TextChunk take_lines();
  TextChunk pass_long_line();
  struct View;  // the text that a chunk is taken from
  std::optional<size_t> split_documents(const View& view, std::vector<TextPart>& parts) const;
  std::optional<size_t> cut_document(const View& view, size_t begin, size_t end) const;
  TextChunk take(size_t num_bytes, bool ends_file);

  std::optional<std::string> separator_;
  const std::vector<TextFile>& files_;
  CutText cut_;
  ChunkOptions options_;
  TextPosition position_;
  std::unique_ptr<ByteSource> input_;
  bool input_ended_ = false;
  std::string buffer_;  // content behind the position, not yet given
};

}  // namespace tessera
