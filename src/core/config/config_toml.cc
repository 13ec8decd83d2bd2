#include "core/config/config_toml.h"

#include <toml++/toml.h>

#include <algorithm>

#include "core/text/utf8.h"

namespace tessera {
namespace {

/// Deeper nesting is refused before the parser sees it: its recursion would use up the stack.
constexpr auto kMaxDots = 10'000;

int64_t line_of(const toml::node& node) {
  return node.source().begin.line;
}

std::string_view kind_name(const toml::node& node) {
  if (node.is_table()) return "a table";
  if (node.is_array()) return "a list";
  return "a date or time";
}

// toml++ 3.3 has undefined behaviour in its test for white space when it meets most characters
// below U+3058 or from U+FB26 to U+FEFE outside ASCII (is_non_ascii_horizontal_whitespace reaches
// TOML_UNREACHABLE). So it never sees those: all characters from U+0080 to U+FFFF travel as private
// ones from U+F0000 on, and come back in keys, strings and messages.

constexpr char kPrivateLead = '\xF3';

char continuation(uint32_t bits) {
  return static_cast<char>(0x80 | (bits & 0x3F));
}

bool is_hidden(std::string_view text, size_t at) {
  return text[at] == kPrivateLead && (text[at + 1] & 0x30) == 0x30;
}

std::string_view without_byte_order_mark(std::string_view text) {
  constexpr std::string_view kMark = "\xEF\xBB\xBF";
  return text.starts_with(kMark) ? text.substr(kMark.size()) : text;
}

/// The valid UTF-8 text with its characters from U+0080 to U+FFFF moved up.
std::string hide_characters(std::string_view text) {
  std::string hidden;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto lead = static_cast<unsigned char>(text[i]);
    const size_t length = lead < 0xC0 || lead > 0xEF ? 1 : lead < 0xE0 ? 2 : 3;
    if (length == 1) {
      hidden += text[i];
      continue;
    }
    uint32_t code = lead & (length == 2 ? 0x1F : 0x0F);
    for (size_t k = 1; k < length; ++k) code = code << 6 | (text[i + k] & 0x3F);
    hidden += {kPrivateLead, continuation(0x30 | code >> 12), continuation(code >> 6),
               continuation(code)};
    i += length - 1;
  }
  return hidden;
}

std::string show_characters(std::string_view text) {
  std::string shown;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text.size() - i < 4 || !is_hidden(text, i)) {
      shown += text[i];
      continue;
    }
    const uint32_t code =
        (text[i + 1] & 0x0F) << 12 | (text[i + 2] & 0x3F) << 6 | (text[i + 3] & 0x3F);
    if (code < 0x800) {
      shown += static_cast<char>(0xC0 | code >> 6);
    } else {
      shown += {static_cast<char>(0xE0 | code >> 12), continuation(code >> 6)};
    }
    shown += continuation(code);
    i += 3;
  }
  return shown;
}

/// Whether an escape such as \\U000F0041 stands in the text; after an odd number of backslashes it
/// is none.
bool has_private_escape(std::string_view text) {
  for (size_t at = text.find("\\U000"); at != std::string_view::npos;
       at = text.find("\\U000", at + 1)) {
    size_t before = at;
    while (before > 0 && text[before - 1] == '\\') --before;
    const bool is_escape = (at - before) % 2 == 0;
    const bool is_private = at + 5 < text.size() && (text[at + 5] == 'F' || text[at + 5] == 'f');
    if (is_escape && is_private) return true;
  }
  return false;
}

void check_characters(std::string_view text, const std::string& name) {
  const size_t valid = valid_utf8_prefix(text);
  const auto line = std::ranges::count(text.substr(0, valid), '\n') + 1;
  require(valid == text.size(), "{}:{}: not valid UTF-8", name, line);
  bool has_private = has_private_escape(text);
  for (size_t at = text.find(kPrivateLead); at != std::string_view::npos;
       at = text.find(kPrivateLead, at + 1)) {
    has_private = has_private || is_hidden(text, at);
  }
  require(!has_private, "{}: it holds characters of the private plane U+F0000", name);
}

std::optional<ConfigScalar> scalar(const toml::node& node) {
  if (const auto* value = node.as_boolean()) return ConfigScalar(value->get());
  if (const auto* value = node.as_integer()) return ConfigScalar(value->get());
  if (const auto* value = node.as_floating_point()) return ConfigScalar(value->get());
  if (const auto* value = node.as_string()) return ConfigScalar(show_characters(value->get()));
  return std::nullopt;
}

ConfigScalar required_scalar(const toml::node& node, const std::string& key,
                             const std::string& name) {
  auto value = scalar(node);
  require(value.has_value(), "{}:{}: {} holds {}, which no configuration value can be", name,
          line_of(node), key, kind_name(node));
  return *value;
}

ConfigValue read_value(const toml::node& node, const std::string& key, const std::string& name) {
  if (const auto* array = node.as_array()) {
    std::vector<ConfigScalar> list;
    for (const toml::node& element : *array) list.push_back(required_scalar(element, key, name));
    return list;
  }
  return std::visit([](const auto& value) { return ConfigValue(value); },
                    required_scalar(node, key, name));
}

void flatten(const toml::table& table, const std::string& prefix, const std::string& name,
             std::vector<TomlEntry>& entries) {
  for (const auto& [part, node] : table) {
    const std::string text = show_characters(part.str());
    require(text.find('.') == std::string::npos,
            "{}:{}: the key '{}' is quoted and holds a dot; write it without quotes", name,
            line_of(node), text);
    const std::string key = prefix.empty() ? text : fmt::format("{}.{}", prefix, text);
    if (const auto* section = node.as_table()) {
      entries.push_back({key, line_of(node), std::nullopt});
      flatten(*section, key, name, entries);
    } else {
      entries.push_back({key, line_of(node), read_value(node, key, name)});
    }
  }
}

std::string quote(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (byte < 0x20 || byte == 0x7F) {
      quoted += fmt::format("\\u{:04X}", byte);
    } else {
      quoted += c;
    }
  }
  return quoted + '"';
}

std::string number_text(double value) {
  std::string text = fmt::format("{}", value);
  if (text.find_first_of(".en") == std::string::npos) text += ".0";
  return text;
}

struct TextOf {
  std::string operator()(bool value) const { return value ? "true" : "false"; }
  std::string operator()(int64_t value) const { return fmt::format("{}", value); }
  std::string operator()(double value) const { return number_text(value); }
  std::string operator()(const std::string& value) const { return quote(value); }
  std::string operator()(const std::vector<ConfigScalar>& list) const {
    std::string text = "[";
    for (size_t i = 0; i < list.size(); ++i) text += (i == 0 ? "" : ", ") + toml_text(list[i]);
    return text + "]";
  }
};

}  // namespace

std::vector<TomlEntry> parse_toml(std::string_view text, const std::string& name) {
  require(std::ranges::count(text, '.') <= kMaxDots,
          "{}: more than {} dots; this is no configuration file", name, kMaxDots);
  check_characters(text, name);
  std::vector<TomlEntry> entries;
  try {
    flatten(toml::parse(hide_characters(without_byte_order_mark(text))), "", name, entries);
  } catch (const toml::parse_error& error) {
    user_error("{}:{}: {}", name, error.source().begin.line, show_characters(error.description()));
  }
  std::ranges::stable_sort(entries, {}, &TomlEntry::line);
  return entries;
}

std::optional<ConfigValue> parse_toml_value(std::string_view text) {
  if (text.find('\n') != std::string_view::npos) return std::nullopt;
  try {
    auto entries = parse_toml(fmt::format("value = {}", text), "value");
    if (entries.size() == 1) return entries.front().value;
  } catch (const UserError&) {
  }
  return std::nullopt;
}

std::string toml_text(const ConfigValue& value) {
  return std::visit(TextOf{}, value);
}
std::string toml_text(const ConfigScalar& value) {
  return std::visit(TextOf{}, value);
}

}  // namespace tessera
