#include <utility>

#include "core/error.h"
#include "data/text/chunk_reader.h"
#include "data/text/json_document.h"
#include "data/text/text_check.h"
#include "data/text/text_source.h"

namespace tessera {
namespace {

/// Behind the last line break up to the limit, or else behind the last space.
size_t cut_between_words(std::string_view text, size_t limit) {
  for (const char c : {'\n', ' '}) {
    const size_t at = text.rfind(c, limit - 1);
    if (at != std::string_view::npos) return at + 1;
  }
  return limit;
}

/// Gives documents on, leaving blank ones out.
class DocumentStream {
 public:
  explicit DocumentStream(const UseText& use) : use_(use) {}

  void add(std::string_view text, bool ends_document) {
    started_ = started_ || !is_blank(text);
    if (started_) use_(text, ends_document);
    if (ends_document) started_ = false;
  }

 private:
  const UseText& use_;
  bool started_ = false;  // something of the document that is not blank has been seen
};

void read_lines(const TextChunk& chunk, const TextFile& file, const TextSource& source,
                DocumentStream& documents) {
  for_each_json_document(chunk, file.path, source, [&](const std::vector<DocumentPart>& parts) {
    std::string text;
    for (const DocumentPart& part : parts) text += part.text;
    documents.add(text, true);
  });
}

}  // namespace

void for_each_document(const TextSource& source, const UseText& use) {
  const std::vector<TextFile> files = list_text_files(source);
  ChunkReader reader(source, files, cut_between_words);
  DocumentStream documents(use);
  TextDamage damage;
  while (const auto chunk = reader.next()) {
    const TextFile& file = files[chunk->begin.file];
    if (file.is_jsonl) {
      read_lines(*chunk, file, source, documents);
      continue;
    }
    damage.add(check_text(chunk->text, file.path, chunk->begin.offset));
    for (const TextPart& part : chunk->parts) {
      documents.add(std::string_view(chunk->text).substr(part.begin, part.end - part.begin),
                    part.ends_document);
    }
    if (!chunk->ends_file) continue;
    require_text(std::exchange(damage, {}), chunk->content_bytes, file.path);
  }
}

}  // namespace tessera
