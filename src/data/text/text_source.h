#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// How the files of a source are read. kAuto: by the ending of the name in letters of
/// either size, before that of a compression; .jsonl and .ndjson hold lines of JSON, everything
/// else is text, and .json is refused, since it may be either.
enum class TextFormat { kAuto, kText, kJsonl };

/// Where documents come from.
struct TextSource {
  /// Files or folders, read in this order; the files of a folder in the order of their paths. Files
  /// ending in .gz, .zst or .xz are decompressed.
  std::vector<std::string> paths;
  TextFormat format = TextFormat::kAuto;
  /// In text: a line that ends a document, e.g. "" for a blank line or "<|endoftext|>"; nothing:
  /// each file is one document.
  std::optional<std::string> separator_line;
  /// In JSONL: the key of a document's text.
  std::string json_key = "text";
  /// Each line of JSONL is an instruction, see json_document.h.
  bool instructions = false;
  /// Lines of JSONL that cannot be used are counted and passed over instead of refused.
  bool skip_invalid = false;

  /// "a, b": the paths as they stand.
  std::string name() const;
};

struct TextFile {
  std::filesystem::path path;
  int64_t num_bytes = 0;    ///< on the disk
  int64_t modified_ns = 0;  ///< time of the last change, which any program can set
  int64_t changed_ns = 0;   ///< and as the system notes it, whatever programs say
  bool is_jsonl = false;
  bool operator==(const TextFile&) const = default;
};

/// The files of the source; of a folder those in its subfolders too, hidden names (".git") and
/// links that lead nowhere left out. Throws UserError when a path is missing (naming the nearest
/// existing one), when there is no text, and for a format that does not fit.
std::vector<TextFile> list_text_files(const TextSource& source);

/// Throws UserError where what is written to `output` would be text of one of the source's folders,
/// so that the same command would find another text the next time. `what` names the output.
void refuse_output_within(const TextSource& source, const std::filesystem::path& output,
                          std::string_view what);

/// Calls `use` for each document of the source that is not blank, in order; for an instruction, for
/// the text of all its parts together. A document in a text file may be longer than memory: it
/// comes in pieces of about 1 MiB, cut between lines where there are any, and `ends_document` is
/// set with the last. Throws UserError as tokenize_text does.
using UseText = std::function<void(std::string_view text, bool ends_document)>;
void for_each_document(const TextSource& source, const UseText& use);

}  // namespace tessera
