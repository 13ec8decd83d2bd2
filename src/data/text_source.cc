#include "data/text_source.h"

#include <algorithm>
#include <cstring>
#include <system_error>

#include "core/error.h"
#include "core/file.h"
#include "core/path.h"
#include "core/utf8.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
constexpr std::string_view kBlanks = " \t\r\n\v\f";

bool is_hidden(const fs::path& path) {
  return path.filename().string().starts_with('.');
}

TextFile describe(const fs::path& path) {
  return {path, static_cast<int64_t>(fs::file_size(path)),
          fs::last_write_time(path).time_since_epoch().count()};
}

std::vector<TextFile> list_folder(const fs::path& folder) {
  std::vector<TextFile> files;
  for (auto at = fs::recursive_directory_iterator(folder); at != fs::recursive_directory_iterator();
       ++at) {
    if (is_hidden(at->path())) {
      at.disable_recursion_pending();
      continue;
    }
    std::error_code broken_link;
    if (at->is_regular_file(broken_link)) files.push_back(describe(at->path()));
  }
  std::ranges::sort(files, {}, [](const TextFile& file) { return file.path.string(); });
  return files;
}

std::vector<TextFile> list_files(const fs::path& path) {
  if (fs::is_directory(path)) return list_folder(path);
  require(fs::is_regular_file(path), "{} is neither a file nor a folder", path.string());
  return {describe(path)};
}

/// Bytes that are not part of valid UTF-8, and where the first one is.
struct Damage {
  int64_t count = 0;
  int64_t first = 0;
};

Damage find_damage(std::string_view text) {
  Damage damage;
  for (size_t at = valid_utf8_prefix(text); at < text.size();) {
    if (damage.count++ == 0) damage.first = static_cast<int64_t>(at);
    ++at;
    at += valid_utf8_prefix(text.substr(at));
  }
  return damage;
}

void check_is_text(std::string_view text, const fs::path& path) {
  constexpr int64_t kTolerated = 1000;  // one bad byte in so many
  const size_t nul = text.find('\0');
  require(nul == std::string_view::npos,
          "{} is no text: it has a NUL byte at offset {}; leave binary files out, and convert "
          "UTF-16 to UTF-8",
          path.string(), nul);
  const Damage damage = find_damage(text);
  require(
      damage.count * kTolerated <= static_cast<int64_t>(text.size()),
      "{} is no UTF-8 text: {} bytes are invalid, the first at offset {}; convert it (iconv) or "
      "leave it out",
      path.string(), damage.count, damage.first);
}

bool is_blank(std::string_view text) {
  return text.find_first_not_of(kBlanks) == std::string_view::npos;
}

std::string_view without_trailing_blanks(std::string_view line) {
  return line.substr(0, line.find_last_not_of(kBlanks) + 1);
}

/// Calls `use` for the stretches of text between the lines that are the separator.
void for_each_part(std::string_view text, std::string_view separator,
                   const std::function<void(std::string_view)>& use) {
  size_t begin = 0;
  for (size_t line = 0; line < text.size();) {
    const size_t end = std::min(text.find('\n', line), text.size());
    const size_t next = std::min(end + 1, text.size());
    if (without_trailing_blanks(text.substr(line, end - line)) == separator) {
      use(text.substr(begin, line - begin));
      begin = next;
    }
    line = next;
  }
  use(text.substr(begin));
}

}  // namespace

std::vector<TextFile> list_text_files(const TextSource& source) {
  require(!source.path.empty(), "no text is given; name a text file or a folder of text files");
  require_exists(source.path, "text");
  std::vector<TextFile> files;
  try {
    files = list_files(source.path);
  } catch (const fs::filesystem_error& error) {
    user_error("cannot read {}: {}", error.path1().string(), error.code().message());
  }
  require(!files.empty(), "the folder {} has no files to learn from", source.path);
  const bool has_text =
      std::ranges::any_of(files, [](const TextFile& file) { return file.num_bytes > 0; });
  require(has_text, "{} is empty: there is no text to learn from", source.path);
  return files;
}

void for_each_document(const TextFile& file, const std::optional<std::string>& separator_line,
                       const std::function<void(std::string_view)>& use) {
  const MappedFile mapped(file.path);
  std::string_view text(reinterpret_cast<const char*>(mapped.bytes().data()),
                        mapped.bytes().size());
  check_is_text(text, file.path);
  if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  const auto use_unless_blank = [&use](std::string_view document) {
    if (!is_blank(document)) use(document);
  };
  if (separator_line) {
    for_each_part(text, without_trailing_blanks(*separator_line), use_unless_blank);
  } else {
    use_unless_blank(text);
  }
}

}  // namespace tessera
