#include "data/text/text_check.h"

#include "core/error.h"
#include "core/text/utf8.h"

namespace tessera {

bool is_blank(std::string_view text) {
  return text.find_first_not_of(" \t\r\n\v\f") == std::string_view::npos;
}

void TextDamage::add(const TextDamage& later) {
  if (count == 0) first = later.first;
  count += later.count;
}

TextDamage check_text(std::string_view text, const std::filesystem::path& path, int64_t offset) {
  const size_t nul = text.find('\0');
  const bool is_parquet = offset == 0 && text.starts_with("PAR1");
  require(nul == std::string_view::npos || !is_parquet,
          "{} is no text but Parquet; read_parquet of the Python module gives its documents, and "
          "write_jsonl or write_tokens a file of them",
          path.string());
  require(nul == std::string_view::npos,
          "{} is no text: it has a NUL byte at offset {}; leave binary files out, and convert "
          "UTF-16 to UTF-8",
          path.string(), offset + static_cast<int64_t>(nul));
  TextDamage damage;
  for (size_t at = valid_utf8_prefix(text); at < text.size();) {
    if (damage.count++ == 0) damage.first = offset + static_cast<int64_t>(at);
    ++at;
    at += valid_utf8_prefix(text.substr(at));
  }
  return damage;
}

void require_text(const TextDamage& damage, int64_t content_bytes,
                  const std::filesystem::path& path) {
  constexpr int64_t kTolerated = 1000;  // one bad byte in this many
  require(damage.count <= content_bytes / kTolerated,
          "{} is no UTF-8 text: {} bytes are invalid, the first at offset {}; convert it (iconv) "
          "or leave it out",
          path.string(), damage.count, damage.first);
}

}  // namespace tessera
