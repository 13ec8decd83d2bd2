#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "data/text/chunk_reader.h"
#include "data/text/text_source.h"

namespace tessera {

/// Text of a document that is encoded by itself.
struct DocumentPart {
  std::string text;
  bool has_loss = true;
  bool ends_turn = false;  ///< the end-of-document id follows, with the same loss
};

/// The document on a line of JSONL, the end-of-document id included. Throws UserError that says
/// what is wrong, without the place.
///
/// Without source.instructions: the text under source.json_key, a string.
/// With it, one of
///   {"prompt": "...", "completion": "..."}
///   {"messages": [{"role": "...", "content": "..."}, ...]}
/// Loss is on the completion, or on the content of each message of the assistant, and on the
/// end-of-document id that follows either. Nothing is put between prompt and completion. Messages
/// become this text, <end> being the end-of-document id:
///   <|system|>\n{content}\n<|user|>\n{content}\n<|assistant|>\n{content}<end><|user|>\n...
/// Roles are system, developer, user, assistant, tool and function; at least one message is the
/// assistant's. Text with loss and text without are encoded apart, as they are when a model is
/// prompted.
std::vector<DocumentPart> parse_json_document(std::string_view line, const TextSource& source);

/// Lines that could not be used: how many, and place and reason of the first.
struct SkippedLines {
  int64_t count = 0;
  std::string first;
};

/// Calls `use` for the document on each line of a chunk of JSONL that is not blank. A line that
/// cannot be used, by `use` throwing UserError too, throws UserError with its place, or is skipped
/// where the source says so.
SkippedLines for_each_json_document(
    const TextChunk& chunk, const std::filesystem::path& path, const TextSource& source,
    const std::function<void(const std::vector<DocumentPart>&)>& use);

}  // namespace tessera
