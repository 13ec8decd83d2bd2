#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "core/error.h"
#include "core/file/file.h"
#include "data/text/chunk_reader.h"

namespace {

using namespace tessera;

struct Reading {
  std::string content;
  std::vector<std::string> documents;
  bool operator==(const Reading&) const = default;
};

/// Reads a file, anew from the last position after each `restart` chunks where that is not 0.
Reading read(const TextSource& source, const ChunkOptions& options, int restart) {
  const auto files = list_text_files(source);
  const CutText cut = [](std::string_view, size_t limit) { return limit; };
  auto reader = std::make_unique<ChunkReader>(source, files, cut, options);
  Reading reading;
  reading.documents.emplace_back();
  int num_chunks = 0;
  while (const auto chunk = reader->next()) {
    reading.content += chunk->text;
    for (const TextPart& part : chunk->parts) {
      ensure(part.begin <= part.end && part.end <= chunk->text.size(), "a part outside its chunk");
      reading.documents.back() += chunk->text.substr(part.begin, part.end - part.begin);
      if (part.ends_document) reading.documents.emplace_back();
    }
    if (restart == 0 || ++num_chunks % restart != 0) continue;
    reader = std::make_unique<ChunkReader>(source, files, cut, options);
    reader->seek(chunk->end);
  }
  return reading;
}

const char* extension(uint8_t kind) {
  constexpr const char* kExtensions[] = {".txt", ".jsonl", ".txt.gz", ".txt.zst", ".txt.xz"};
  return kExtensions[kind % 5];
}

}  // namespace

/// The input's first bytes choose the kind of file and the sizes; the rest is the file. Reading it
/// in chunks of any size, and going on from any position, gives the same documents.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 3) return 0;
  static const std::filesystem::path kFolder =
      std::filesystem::temp_directory_path() / unique_name("chunk_reader_fuzz-");
  std::filesystem::create_directories(kFolder);
  const std::filesystem::path path = kFolder / (std::string("input") + extension(data[0]));
  OutputFile file(path);
  file.write(std::as_bytes(std::span(data + 3, size - 3)));
  file.close();
  TextSource source;
  source.paths = {path.string()};
  source.separator_line = "--";
  const size_t chunk = 1 + data[1];
  const ChunkOptions small = {
      .chunk_bytes = chunk, .lookahead_bytes = 4096, .max_line_bytes = 4096};
  const ChunkOptions large = {
      .chunk_bytes = 1 << 16, .lookahead_bytes = 4096, .max_line_bytes = 1 << 20};
  try {
    const Reading whole = read(source, large, 0);
    const Reading parts = read(source, small, 1 + data[2] % 4);
    const bool has_long_line = size > small.max_line_bytes;
    ensure(whole == parts || has_long_line, "chunks of {} bytes give another content", chunk);
  } catch (const UserError&) {
  }
  return 0;
}
