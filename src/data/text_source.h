#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// Where text comes from and how it is cut into documents.
struct TextSource {
  std::string path;  ///< a text file, or a folder whose files are read in the order of their paths
  /// A line that ends a document, e.g. "" for a blank line or "<|endoftext|>"; nothing: each file
  /// is one document.
  std::optional<std::string> separator_line;
};

struct TextFile {
  std::filesystem::path path;
  int64_t num_bytes = 0;
  int64_t modified_ns = 0;  ///< time of the last change
  bool operator==(const TextFile&) const = default;
};

/// The files of the source, in the order of their paths; a folder is read with its subfolders,
/// hidden names (".git") and links that lead nowhere left out. Throws UserError when the path is
/// missing (naming the nearest existing one), or has no text in it.
std::vector<TextFile> list_text_files(const TextSource& source);

/// Calls `use` for each document that is not blank, in order. Throws UserError for a file that is
/// not text: one with NUL bytes or with invalid UTF-8 in more than one byte of 1000; the message
/// has the place of the first.
void for_each_document(const TextFile& file, const std::optional<std::string>& separator_line,
                       const std::function<void(std::string_view)>& use);

}  // namespace tessera
