#include "data/text/chunk_reader.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace tessera {
namespace {

constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";

std::string_view without_trailing_blanks(std::string_view line) {
  return line.substr(0, line.find_last_not_of(" \t\r\n\v\f") + 1);
}

/// The last place up to `limit` that is not inside a character, but behind `begin`.
size_t between_characters(std::string_view text, size_t begin, size_t limit) {
  constexpr size_t kLongest = 4;  // bytes of a character; what is longer is no UTF-8
  const auto is_inside = [text](size_t at) {
    return at < text.size() && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80;
  };
  size_t at = limit;
  while (at > begin && at + kLongest > limit && is_inside(at)) --at;
  if (at <= begin) {
    for (at = begin + 1; at < begin + kLongest && is_inside(at);) ++at;
  }
  return is_inside(at) ? std::max(limit, begin + 1) : at;
}

/// The lines of a text, one after the other.
class LineScanner {
 public:
  /// `at_line`: the text begins at the begin of a line; `complete`: it ends at the end of one.
  LineScanner(std::string_view text, bool at_line, bool complete)
      : text_(text), at_line_(at_line), complete_(complete) {}

  size_t begin() const { return begin_; }
  size_t next() const { return std::min(end_ + 1, text_.size()); }
  bool done() const { return begin_ >= text_.size(); }
  /// Whether the line, which must be a whole one, is `separator`.
  bool is(std::string_view separator) {
    const size_t newline = text_.find('\n', begin_);
    end_ = std::min(newline, text_.size());
    const bool whole = at_line_ && (complete_ || newline != std::string_view::npos);
    return whole && without_trailing_blanks(text_.substr(begin_, end_ - begin_)) == separator;
  }
  /// To the line after the one that was looked at.
  void advance() {
    begin_ = next();
    at_line_ = true;
  }

 private:
  std::string_view text_;
  bool at_line_;
  bool complete_;
  size_t begin_ = 0;
  size_t end_ = 0;
};

}  // namespace

ChunkReader::ChunkReader(const TextSource& source, const std::vector<TextFile>& files, CutText cut,
                         const ChunkOptions& options)
    : files_(files), cut_(std::move(cut)), options_(options) {
  if (source.separator_line) separator_ = without_trailing_blanks(*source.separator_line);
}

void ChunkReader::seek(const TextPosition& position) {
  position_ = position;
  input_.reset();
}

std::optional<TextChunk> ChunkReader::next() {
  if (position_.file >= static_cast<int64_t>(files_.size())) return std::nullopt;
  if (!input_) open();
  return files_[position_.file].is_jsonl ? take_lines() : take_text();
}

void ChunkReader::open() {
  input_ = open_byte_source(files_[position_.file].path);
  input_ended_ = false;
  buffer_.clear();
  if (position_.offset > 0) return input_->skip(position_.offset);
  fill(kByteOrderMark.size());
  if (!buffer_.starts_with(kByteOrderMark)) return;
  buffer_.clear();
  position_.offset = static_cast<int64_t>(kByteOrderMark.size());
}

/// Reads until the buffer has that many bytes, or the file has ended.
void ChunkReader::fill(size_t num_bytes) {
  const size_t before = buffer_.size();
  if (input_ended_ || before >= num_bytes) return;
  buffer_.resize(num_bytes);
  const size_t count = input_->read(std::as_writable_bytes(std::span(buffer_)).subspan(before));
  buffer_.resize(before + count);
  input_ended_ = buffer_.size() < num_bytes;
}

/// Gives the first bytes of the buffer away.
TextChunk ChunkReader::take(size_t num_bytes, bool ends_file) {
  TextChunk chunk;
  chunk.begin = position_;
  std::string rest = buffer_.substr(num_bytes);
  buffer_.resize(num_bytes);
  chunk.text = std::exchange(buffer_, std::move(rest));
  chunk.file_position = input_->file_position();
  position_.offset += static_cast<int64_t>(num_bytes);
  position_.line += std::ranges::count(chunk.text, '\n');
  if (num_bytes > 0) position_.at_line = chunk.text.back() == '\n';
  chunk.content_bytes = position_.offset;
  chunk.ends_file = ends_file;
  if (ends_file) seek({.file = position_.file + 1});
  chunk.end = position_;
  return chunk;
}

struct ChunkReader::View {
  std::string_view text;
  bool at_end = false;     ///< the file ends with it
  bool ends_file = false;  ///< and all of it goes into this chunk
};

TextChunk ChunkReader::take_text() {
  std::vector<TextPart> parts;
  std::optional<size_t> size;
  View view;
  // Where a document can be cut only far behind the limit, more must be seen.
  for (size_t seen = options_.chunk_bytes + options_.lookahead_bytes; !size; seen *= 2) {
    fill(seen);
    view.text = std::string_view(buffer_).substr(0, seen);
    view.at_end = input_ended_ && buffer_.size() <= seen;
    view.ends_file = view.at_end && buffer_.size() <= options_.chunk_bytes;
    size = split_documents(view, parts);
  }
  TextChunk chunk = take(*size, view.ends_file);
  if (!view.ends_file && !parts.empty()) position_.in_document = !parts.back().ends_document;
  chunk.end = position_;
  chunk.parts = std::move(parts);
  return chunk;
}

/// Finds the documents up to where the chunk ends. Nothing: more text must be seen.
std::optional<size_t> ChunkReader::split_documents(const View& view,
                                                   std::vector<TextPart>& parts) const {
  parts.clear();
  const size_t limit = std::min(options_.chunk_bytes, view.text.size());
  size_t document = 0;
  size_t document_end = view.text.size();
  bool end_is_known = view.at_end;
  const auto add = [&](size_t end, bool ends_document) {
    const bool continues = parts.empty() && position_.in_document;
    parts.push_back({document, end, ends_document, continues});
  };
  if (separator_) {
    LineScanner lines(view.text, position_.at_line, view.at_end);
    for (; !lines.done(); lines.advance()) {
      if (!lines.is(*separator_)) continue;
      if (lines.begin() >= limit && !view.ends_file) {
        document_end = lines.begin();
        end_is_known = true;
        break;
      }
      add(lines.begin(), true);
      document = lines.next();
    }
  }
  if (!view.ends_file && document >= limit) return document;
  std::optional<size_t> end = document_end;
  if (!view.ends_file) {
    end = cut_document({view.text, end_is_known}, document, document_end);
  }
  if (end) add(*end, view.ends_file);
  return end;
}

/// Where the document [begin, end) of the view, which goes beyond the chunk, is cut.
std::optional<size_t> ChunkReader::cut_document(const View& view, size_t begin, size_t end) const {
  // So much behind a cut must be seen for the tokenizer to be sure of it.
  constexpr size_t kGuard = 256;
  const size_t limit =
      between_characters(view.text, begin, std::min(options_.chunk_bytes, end - 1));
  if (limit >= end) return end;
  const size_t cut = begin + cut_(view.text.substr(begin, end - begin), limit - begin);
  if (!view.at_end && cut + kGuard > end) return std::nullopt;
  return cut;
}

TextChunk ChunkReader::take_lines() {
  fill(options_.chunk_bytes);
  if (input_ended_ && buffer_.size() <= options_.chunk_bytes) return take(buffer_.size(), true);
  size_t newline = buffer_.rfind('\n', options_.chunk_bytes - 1);
  if (newline == std::string::npos) newline = buffer_.find('\n', options_.chunk_bytes);
  while (newline == std::string::npos && !input_ended_ &&
         buffer_.size() < options_.max_line_bytes) {
    const size_t searched = buffer_.size();
    fill(std::min(2 * searched, options_.max_line_bytes));
    newline = buffer_.find('\n', searched);
  }
  if (newline != std::string::npos) return take(newline + 1, false);
  if (buffer_.size() < options_.max_line_bytes) return take(buffer_.size(), true);
  return pass_long_line();
}

/// A line that does not fit: gives a chunk that says so, and goes on behind it.
TextChunk ChunkReader::pass_long_line() {
  TextPosition begin = position_;
  size_t newline = std::string::npos;
  while (newline == std::string::npos && !buffer_.empty()) {
    position_.offset += static_cast<int64_t>(buffer_.size());
    buffer_.clear();
    fill(options_.chunk_bytes);
    newline = buffer_.find('\n');
  }
  TextChunk chunk = newline == std::string::npos ? take(0, true) : take(newline + 1, false);
  chunk.begin = begin;
  chunk.text.clear();
  chunk.too_long = true;
  return chunk;
}

}  // namespace tessera
