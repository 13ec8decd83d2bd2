#include "core/config/config.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "core/config/config_toml.h"
#include "core/config/typed_number.h"
#include "core/file/file.h"
#include "core/file/path.h"
#include "core/text/names.h"
#include "core/text/utf8.h"

namespace tessera {
namespace {

constexpr int64_t kMaxFileBytes = 1 << 20;
bool is_bare_key(std::string_view key) {
  const auto allowed = [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '_' || c == '-' || c == '.';
  };
  return !key.empty() && std::ranges::all_of(key, allowed) && key.front() != '.' &&
         key.back() != '.' && key.find("..") == std::string_view::npos;
}

std::string section_of(const std::string& key) {
  const size_t dot = key.rfind('.');
  return dot == std::string::npos ? "" : key.substr(0, dot);
}

std::string name_in_section(const std::string& key) {
  return key.substr(key.rfind('.') + 1);
}

/// Origins stand in comments of TOML, which hold neither control characters nor broken UTF-8.
std::string printable(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) c = '?';
  }
  for (size_t bad = valid_utf8_prefix(text); bad < text.size(); bad = valid_utf8_prefix(text)) {
    text[bad] = '?';
  }
  return text;
}

std::string_view trim(std::string_view text) {
  const size_t first = text.find_first_not_of(' ');
  if (first == std::string_view::npos) return "";
  return text.substr(first, text.find_last_not_of(' ') - first + 1);
}

std::optional<ConfigScalar> as_scalar(const ConfigValue& value) {
  return std::visit(
      [](const auto& v) -> std::optional<ConfigScalar> {
        if constexpr (std::is_constructible_v<ConfigScalar, decltype(v)>) return ConfigScalar(v);
        return std::nullopt;
      },
      value);
}

}  // namespace

bool Range::contains(double value) const {
  return std::isfinite(value) && (min_open ? value > min : value >= min) &&
         (max_open ? value < max : value <= max);
}

std::string Range::to_string() const {
  const bool has_min = std::isfinite(min);
  const bool has_max = std::isfinite(max);
  const std::string low = fmt::format("{} {}", min_open ? "above" : "at least", min);
  const std::string high = fmt::format("{} {}", max_open ? "below" : "at most", max);
  if (has_min && has_max && !min_open && !max_open) return fmt::format("from {} to {}", min, max);
  if (has_min && has_max) return low + " and " + high;
  return has_min ? low : has_max ? high : "";
}

/// Where a value stands: what its origin will be, and how a message about it begins.
struct ConfigSchema::Place {
  std::string origin;
  ConfigLevel level;

  /// "run.toml:12: model.hidden_size", or "--model.hidden_size" and what else names the key alone.
  std::string subject(const std::string& key) const {
    return origin == "--" + key || origin == key ? origin : fmt::format("{}: {}", origin, key);
  }
};

void ConfigSchema::add_field(Field field) {
  ensure(is_bare_key(field.key), "'{}' cannot be a configuration key", field.key);
  for (const Field& other : fields_) {
    const bool clash = other.key == field.key || other.key.starts_with(field.key + ".") ||
                       field.key.starts_with(other.key + ".");
    ensure(!clash, "configuration keys {} and {} clash", other.key, field.key);
  }
  const ConfigValue initial = field.get();
  const std::string problem = field.set(initial);
  ensure(problem.empty(), "the default of {} {}", field.key, problem);
  field.default_text = toml_text(initial);
  // Sections stay together, and keys outside any section come first, as TOML demands.
  const std::string section = section_of(field.key);
  const auto in_section = [&section](const Field& f) { return section_of(f.key) == section; };
  const auto last = std::find_if(fields_.rbegin(), fields_.rend(), in_section).base();
  const bool is_first = last == fields_.begin();
  fields_.insert(is_first && !section.empty() ? fields_.end() : last, std::move(field));
}

std::string ConfigSchema::read_file(const std::string& path) {
  require_exists(path, "configuration file");
  return read_text_file(path, kMaxFileBytes);
}

void ConfigSchema::load_toml(const std::string& path) {
  load(read_file(path), path, ConfigLevel::kFile);
}

void ConfigSchema::load_toml_text(std::string_view text, const std::string& name) {
  load(text, name, ConfigLevel::kFile);
}

void ConfigSchema::load_preset(const std::string& name, std::string_view toml_text) {
  load(toml_text, "preset " + name, ConfigLevel::kPreset);
}

void ConfigSchema::load(std::string_view text, const std::string& file, ConfigLevel level) {
  const std::string name = printable(file);
  for (const TomlEntry& entry : parse_toml(text, name)) {
    const std::string at = fmt::format("{}:{}", name, entry.line);
    if (entry.value) {
      assign(entry.key, *entry.value, {level == ConfigLevel::kPreset ? name : at, level});
      continue;
    }
    const Field* field = find(entry.key);
    require(field == nullptr, "{}: {} must be {}, found a section", at, entry.key,
            field == nullptr ? "" : field->type);
    const auto inside = [&entry](const Field& f) { return f.key.starts_with(entry.key + "."); };
    require(std::ranges::any_of(fields_, inside), "{}: unknown section [{}]{}", at, entry.key,
            did_you_mean(entry.key, sections()));
  }
}

void ConfigSchema::override_value(const std::string& key, std::string_view text,
                                  std::string origin) {
  const Place place{printable(origin.empty() ? "--" + key : std::move(origin)),
                    ConfigLevel::kOverride};
  const Field* field = find(key);
  if (field == nullptr) user_error("{}", unknown_key(key, place));
  assign(key, read_value(*field, text, place), place);
}

ConfigScalar ConfigSchema::read_scalar(const Field& field, std::string_view text,
                                       const Place& place) {
  if (field.is_text) return std::string(text);
  if (field.is_number) {
    const std::string problem = describe_unheld(text, field.is_integer, field.range);
    require(problem.empty(), "{} {}", place.subject(field.key), problem);
  }
  // TOML would take what stands behind a # for a comment.
  const bool whole = text.find('#') == std::string_view::npos;
  if (const auto value = whole ? parse_toml_value(text) : std::nullopt) {
    if (const auto scalar = as_scalar(*value)) return *scalar;
  }
  // TOML knows no integers beyond 64 bits.
  const auto number = field.is_number && !field.is_integer ? parse_decimal(text) : std::nullopt;
  if (number && parse_toml_value(fmt::format("{}.0", text))) return *number;
  return std::string(text);
}

/// 512, a,b,c or [a, b, c]
ConfigValue ConfigSchema::read_value(const Field& field, std::string_view text,
                                     const Place& place) {
  if (!field.is_list) {
    return std::visit([](const auto& value) { return ConfigValue(value); },
                      read_scalar(field, text, place));
  }
  if (text.starts_with('[') && text.ends_with(']')) {
    if (const auto list = field.is_text ? parse_toml_value(text) : std::nullopt) return *list;
    // Cut at its commas, such a list would be one of other texts.
    require(text.find('"') == std::string_view::npos,
            "{} is no list as TOML has it: {}; write [\"a\", \"b\"] with every text in quotes, or "
            "a,b without quotes and brackets",
            place.subject(field.key), text);
    if (field.is_number) text = text.substr(1, text.size() - 2);
  }
  std::vector<ConfigScalar> list;
  while (!trim(text).empty()) {
    const size_t comma = std::min(text.find(','), text.size());
    list.push_back(read_scalar(field, trim(text.substr(0, comma)), place));
    text.remove_prefix(std::min(comma + 1, text.size()));
  }
  return list;
}

void ConfigSchema::override_argument(std::string_view argument) {
  const size_t equals = argument.find('=');
  require(argument.starts_with("--") && equals != std::string_view::npos,
          "'{}' is no option; write --section.key=value", argument);
  override_value(std::string(argument.substr(2, equals - 2)), argument.substr(equals + 1));
}

void ConfigSchema::assign(const std::string& key, const ConfigValue& value, const Place& place) {
  const auto at = std::ranges::find(fields_, key, &Field::key);
  if (at == fields_.end()) user_error("{}", unknown_key(key, place));
  const ConfigValue kept = at->get();
  const std::string problem = at->set(value);
  require(problem.empty(), "{} {}", place.subject(key), problem);
  if (place.level < at->level) {
    at->set(kept);
    return;
  }
  at->level = place.level;
  at->origin = place.origin;
}

std::string ConfigSchema::unknown_key(const std::string& key, const Place& place) const {
  const auto known_sections = sections();
  if (std::ranges::find(known_sections, key) != known_sections.end()) {
    return fmt::format("{} is a section; set one of its keys", place.subject(key));
  }
  const bool typed = place.origin == "--" + key;
  return fmt::format("{}: unknown key '{}'{}", typed ? "command line" : place.origin, key,
                     suggestion(key));
}

/// A key of the same name in another section is meant more often than one that is merely spelt
/// alike.
std::string ConfigSchema::suggestion(const std::string& key) const {
  for (const Field& field : fields_) {
    if (name_in_section(field.key) == name_in_section(key)) {
      return fmt::format("; did you mean '{}'?", field.key);
    }
  }
  return did_you_mean(key, keys());
}

const ConfigSchema::Field* ConfigSchema::find(const std::string& key) const {
  const auto at = std::ranges::find(fields_, key, &Field::key);
  return at == fields_.end() ? nullptr : &*at;
}

const ConfigSchema::Field& ConfigSchema::at(const std::string& key) const {
  const Field* field = find(key);
  ensure(field != nullptr, "unknown configuration key {}", key);
  return *field;
}

bool ConfigSchema::is_set(const std::string& key) const {
  return at(key).level != ConfigLevel::kDefault;
}

const std::string& ConfigSchema::origin(const std::string& key) const {
  return at(key).origin;
}

std::vector<std::string> ConfigSchema::keys() const {
  std::vector<std::string> keys;
  for (const Field& field : fields_) keys.push_back(field.key);
  return keys;
}

std::vector<std::string> ConfigSchema::sections() const {
  std::vector<std::string> sections;
  for (const Field& field : fields_) {
    for (std::string s = section_of(field.key); !s.empty(); s = section_of(s)) {
      if (std::ranges::find(sections, s) == sections.end()) sections.push_back(s);
    }
  }
  return sections;
}

std::vector<ResolvedValue> ConfigSchema::resolved() const {
  std::vector<ResolvedValue> values;
  for (const Field& field : fields_) {
    values.push_back({field.key, toml_text(field.get()), field.origin});
  }
  return values;
}

std::string ConfigSchema::to_toml() const {
  constexpr size_t kWidest = 48;  // a longer value moves its own comment only
  const auto values = resolved();
  size_t key_width = 0;
  size_t value_width = 0;
  for (const ResolvedValue& value : values) {
    key_width = std::max(key_width, name_in_section(value.key).size());
    if (value.value.size() <= kWidest) value_width = std::max(value_width, value.value.size());
  }
  std::string text;
  std::string section;
  for (const ResolvedValue& value : values) {
    if (section_of(value.key) != section) {
      section = section_of(value.key);
      text += fmt::format("{}[{}]\n", text.empty() ? "" : "\n", section);
    }
    text += fmt::format("{:<{}} = {:<{}}  # {}\n", name_in_section(value.key), key_width,
                        value.value, value_width, value.origin);
  }
  return text;
}

std::string ConfigSchema::to_json() const {
  std::string text = "{";
  for (const Field& field : fields_) {
    const std::string value = toml_text(field.get());
    const bool unset = field.is_optional && value == toml_text(ConfigScalar("none"));
    text +=
        fmt::format("{}\n  \"{}\": {{\"value\": {}, \"origin\": {}}}", text.size() == 1 ? "" : ",",
                    field.key, unset ? "null" : value, toml_text(ConfigScalar(field.origin)));
  }
  return text + "\n}\n";
}

std::string ConfigSchema::help_text() const {
  std::string text;
  std::string section;
  for (const Field& field : fields_) {
    if (section_of(field.key) != section) {
      section = section_of(field.key);
      text += fmt::format("{}[{}]\n", text.empty() ? "" : "\n", section);
    }
    text += fmt::format("  --{}={}\n      {} ({}{}{})\n", field.key, field.default_text, field.help,
                        field.type, field.limit.empty() ? "" : ", ", field.limit);
  }
  return text;
}

}  // namespace tessera
