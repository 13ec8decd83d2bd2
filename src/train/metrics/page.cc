#include "train/metrics/page.h"

#include <algorithm>

#include "core/error.h"
#include "core/text/utf8.h"

namespace tessera {
namespace {

std::string_view entity(char c) {
  switch (c) {
    case '&':
      return "&amp;";
    case '<':
      return "&lt;";
    case '>':
      return "&gt;";
    case '"':
      return "&quot;";
    case '\'':
      return "&#39;";
    default:
      return {};
  }
}

}  // namespace

std::string valid_utf8(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const size_t valid = valid_utf8_prefix(text);
    result += text.substr(0, valid);
    text.remove_prefix(valid);
    if (text.empty()) break;
    result += "\xef\xbf\xbd";
    text.remove_prefix(1);
  }
  return result;
}

std::string escape_html(std::string_view text) {
  std::string result;
  for (const char c : valid_utf8(text)) {
    const std::string_view replacement = entity(c);
    if (replacement.empty()) {
      result += c;
    } else {
      result += replacement;
    }
  }
  return result;
}

std::string escape_json(std::string_view json) {
  std::string result;
  for (const char c : json) {
    if (c == '<') {
      result += "\\u003c";
    } else {
      result += c;
    }
  }
  return result;
}

std::string fill_page(std::string_view page,
                      const std::vector<std::pair<std::string_view, std::string>>& values) {
  std::string result;
  for (;;) {
    const size_t begin = page.find("{{");
    result += page.substr(0, begin);
    if (begin == page.npos) return result;
    const size_t end = page.find("}}", begin);
    const std::string_view name = page.substr(begin + 2, end - begin - 2);
    const auto value =
        std::find_if(values.begin(), values.end(), [&](const auto& v) { return v.first == name; });
    ensure(value != values.end(), "the report's page asks for '{}', which is not known", name);
    result += value->second;
    page.remove_prefix(end + 2);
  }
}

}  // namespace tessera
