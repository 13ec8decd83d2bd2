#include <cstddef>
#include <cstdint>
#include <string_view>

#include "core/error.h"
#include "data/text/json_document.h"

namespace {

using namespace tessera;

void parse(std::string_view text, bool instructions) {
  TextSource source;
  source.instructions = instructions;
  TextChunk chunk;
  chunk.text = text;
  for (const bool skip : {false, true}) {
    source.skip_invalid = skip;
    try {
      const SkippedLines skipped = for_each_json_document(
          chunk, "fuzz.jsonl", source, [](const std::vector<DocumentPart>& document) {
            ensure(!document.empty() && document.back().ends_turn, "a document without end");
          });
      ensure(skip || skipped.count == 0, "skipped what was to be refused");
    } catch (const UserError&) {
      ensure(!skip, "refused what was to be skipped");
    }
  }
}

}  // namespace

/// The input is the content of a JSONL file.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  parse(text, false);
  parse(text, true);
  return 0;
}
