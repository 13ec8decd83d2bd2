#include "data/text/text_source.h"

#include <fmt/ranges.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "core/error.h"
#include "core/file/path.h"
#include "data/text/byte_source.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

bool is_hidden(const fs::path& path) {
  return path.filename().string().starts_with('.');
}

/// The ending of the name below that of a compression.
std::string content_extension(const fs::path& path) {
  const bool compressed = compression_of(path) != FileCompression::kNone;
  return lower_extension(compressed ? path.stem() : path);
}

bool holds_jsonl(const fs::path& path, const TextSource& source) {
  if (source.format == TextFormat::kJsonl) return true;
  const std::string extension = content_extension(path);
  const bool named_jsonl = extension == ".jsonl" || extension == ".ndjson";
  if (source.instructions) {
    require(named_jsonl && source.format == TextFormat::kAuto,
            "{}: instructions are lines of JSON; name the file .jsonl or set the format to jsonl",
            path.string());
  }
  if (source.format == TextFormat::kText) return false;
  require(extension != ".json",
          "{} may hold lines of JSON or be text itself; say which by the format, jsonl or text",
          path.string());
  return named_jsonl;
}

int64_t nanoseconds(const timespec& time) {
  return time.tv_sec * int64_t{1'000'000'000} + time.tv_nsec;
}

TextFile describe(const fs::path& path, const TextSource& source) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) {
    throw fs::filesystem_error("stat", path, std::error_code(errno, std::generic_category()));
  }
  return {path, status.st_size, nanoseconds(status.st_mtim), nanoseconds(status.st_ctim),
          holds_jsonl(path, source)};
}

std::vector<TextFile> list_folder(const fs::path& folder, const TextSource& source) {
  std::vector<TextFile> files;
  for (auto at = fs::recursive_directory_iterator(folder); at != fs::recursive_directory_iterator();
       ++at) {
    if (is_hidden(at->path())) {
      at.disable_recursion_pending();
      continue;
    }
    std::error_code broken_link;
    if (at->is_regular_file(broken_link)) files.push_back(describe(at->path(), source));
  }
  std::ranges::sort(files, {}, [](const TextFile& file) { return file.path.string(); });
  return files;
}

std::vector<TextFile> list_path(const std::string& path, const TextSource& source) {
  require_exists(path, "text");
  if (!fs::is_directory(path)) {
    require(fs::is_regular_file(path), "{} is neither a file nor a folder", path);
    return {describe(path, source)};
  }
  std::vector<TextFile> files = list_folder(path, source);
  require(!files.empty(), "the folder {} has no files to learn from", path);
  return files;
}

/// Whether a folder's text has what is under this path, if it exists.
bool is_listed(const fs::path& folder, const fs::path& path) {
  std::error_code unreadable;  // of a relative path that does not exist, canonical is not absolute
  const fs::path whole = fs::weakly_canonical(fs::absolute(path), unreadable);
  const fs::path inside = whole.lexically_relative(fs::canonical(folder, unreadable));
  if (unreadable || inside.empty()) return false;
  if (inside == ".") return true;
  // ".." leads out of it; other names with a dot are hidden.
  return std::ranges::none_of(inside, [](const fs::path& name) { return is_hidden(name); });
}

}  // namespace

void refuse_output_within(const TextSource& source, const fs::path& output, std::string_view what) {
  for (const std::string& path : source.paths) {
    require(!fs::is_directory(path) || !is_listed(path, output),
            "{} {} is in the folder {}, whose files are the text: what is written there would be "
            "text the next time; choose a place outside of it, or name the text's files",
            what, output.string(), path);
  }
}

std::string TextSource::name() const {
  return fmt::format("{}", fmt::join(paths, ", "));
}

std::vector<TextFile> list_text_files(const TextSource& source) {
  const bool named =
      !source.paths.empty() && std::ranges::none_of(source.paths, &std::string::empty);
  require(named, "no text is given; name a text file or a folder of text files");
  std::vector<TextFile> files;
  for (const std::string& path : source.paths) {
    try {
      std::ranges::move(list_path(path, source), std::back_inserter(files));
    } catch (const fs::filesystem_error& error) {
      user_error("cannot read {}: {}", error.path1().string(), error.code().message());
    }
  }
  const bool has_text =
      std::ranges::any_of(files, [](const TextFile& file) { return file.num_bytes > 0; });
  require(has_text, "{} is empty: there is no text to learn from", source.name());
  return files;
}

}  // namespace tessera
