#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "core/error.h"

namespace tessera {

/// The numbers that a field may hold; the default is every finite number.
struct Range {
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool min_open = false;  ///< the minimum itself is not allowed
  bool max_open = false;

  bool contains(double value) const;
  /// "at least 1", "from 0 to 1", "above 0"; "" where everything is allowed.
  std::string to_string() const;
};
inline Range at_least(double min) {
  return {.min = min};
}
inline Range above(double min) {
  return {.min = min, .min_open = true};
}
inline Range between(double min, double max) {
  return {.min = min, .max = max};
}
/// From min up to, but not including, max.
inline Range from_below(double min, double max) {
  return {.min = min, .max = max, .max_open = true};
}

using ConfigScalar = std::variant<bool, int64_t, double, std::string>;
/// A value as it stands in a configuration, before it is checked against its field.
using ConfigValue = std::variant<bool, int64_t, double, std::string, std::vector<ConfigScalar>>;

/// Where a value comes from; a later one wins over an earlier one, whatever the order in which they
/// are given.
enum class ConfigLevel { kDefault, kPreset, kFile, kOverride };

/// One key of a configuration as it stands now.
struct ResolvedValue {
  std::string key;     ///< "model.hidden_size"
  std::string value;   ///< as TOML: 512, 0.1, "text", [1, 2]
  std::string origin;  ///< "default", "preset small", "run.toml:12", "--model.hidden_size"
  bool operator==(const ResolvedValue&) const = default;
};

/// The one description of every option: binds keys such as "model.hidden_size" to fields of plain
/// structs, fills them from TOML files, presets and command-line overrides, and remembers where
/// each value came from.
///
/// A field's value when it is added is its default. The fields must outlive the schema. Everything
/// a user can get wrong (an unknown key or section, a wrong type, a number out of range, an unknown
/// name, broken TOML, a missing file) throws UserError that names the place, what was found and
/// what was expected; fields set before the error keep their new values. Numbers are never read
/// from strings, nor strings from numbers; an integer may stand for a real number.
///
///   ModelConfig model;
///   ConfigSchema schema;
///   schema.add("model.hidden_size", &model.hidden_size, "Width", at_least(1));
///   schema.load_toml("run.toml");
///   schema.override_argument("--model.hidden_size=512");
class ConfigSchema {
 public:
  /// T is bool, int64_t, double, std::string, a std::vector of one of the last three, or
  /// std::optional of one of the four. An empty optional is written "none", in files and on
  /// the command line alike. The range holds for numbers, for each one of a list.
  template <typename T>
  void add(std::string key, T* field, std::string help, Range range = {});

  /// A field that is one of several named values.
  template <typename Enum>
  void add_enum(std::string key, Enum* field, std::vector<std::pair<std::string, Enum>> names,
                std::string help);

  /// A string field that must be one of `names` (presets, say).
  void add_choice(std::string key, std::string* field, std::vector<std::string> names,
                  std::string help);

  /// A TOML file's text, for load_toml_text. Throws UserError where it cannot be read.
  static std::string read_file(const std::string& path);
  /// Sets every key of a TOML file.
  void load_toml(const std::string& path);
  /// The same from text; `name` stands for the file in origins and messages.
  void load_toml_text(std::string_view text, const std::string& name);
  /// Sets keys from TOML text where neither a file nor an override has set them; the origin is
  /// "preset <name>".
  void load_preset(const std::string& name, std::string_view toml_text);
  /// Sets one key from text as typed: 512, 1_000, 0.1, true, a bare string, a,b,c or [1, 2] for a
  /// list. A number that its type cannot hold is refused, never changed. The default origin is
  /// "--<key>".
  void override_value(const std::string& key, std::string_view text, std::string origin = "");
  /// The same from one argument: "--section.key=value".
  void override_argument(std::string_view argument);

  /// Whether anything but the default gave the value. Throws InternalError for an unknown key, as
  /// origin() does.
  bool is_set(const std::string& key) const;
  const std::string& origin(const std::string& key) const;
  bool has_key(const std::string& key) const { return find(key) != nullptr; }
  std::vector<std::string> keys() const;

  /// Every key in the order of adding, sections kept together.
  std::vector<ResolvedValue> resolved() const;
  /// All of it as TOML with each value's origin as a comment; loading it again gives the same
  /// values.
  std::string to_toml() const;
  /// {"model.hidden_size": {"value": 512, "origin": "default"}, ...}
  std::string to_json() const;
  /// One entry a key: its type, help, range or names, and default.
  std::string help_text() const;

 private:
  struct Field {
    std::string key;
    std::string help;
    std::string type;        ///< "an integer", "one of a, b"
    std::string limit = {};  ///< "at least 1" or ""
    bool is_list = false;
    bool is_optional = false;
    bool is_text = false;  ///< overrides are taken as they stand
    bool is_number = false;
    bool is_integer = false;  ///< a number without fractions
    Range range = {};
    /// Stores the value, or returns what is wrong with it ("" when nothing is).
    std::function<std::string(const ConfigValue&)> set;
    std::function<ConfigValue()> get;
    std::string default_text = {};
    std::string origin = "default";
    ConfigLevel level = ConfigLevel::kDefault;
  };
  struct Place;  // where a value stands, for messages

  void add_field(Field field);
  void add_names(std::string key, std::vector<std::string> names, std::string help,
                 std::function<void(size_t)> set_index, std::function<size_t()> get_index);
  void load(std::string_view text, const std::string& file, ConfigLevel level);
  void assign(const std::string& key, const ConfigValue& value, const Place& place);
  static ConfigScalar read_scalar(const Field& field, std::string_view text, const Place& place);
  static ConfigValue read_value(const Field& field, std::string_view text, const Place& place);
  const Field* find(const std::string& key) const;
  const Field& at(const std::string& key) const;
  std::vector<std::string> sections() const;
  std::string unknown_key(const std::string& key, const Place& place) const;
  std::string suggestion(const std::string& key) const;

  std::vector<Field> fields_;
};

template <typename Enum>
void ConfigSchema::add_enum(std::string key, Enum* field,
                            std::vector<std::pair<std::string, Enum>> names, std::string help) {
  std::vector<std::string> texts;
  for (const auto& [text, value] : names) texts.push_back(text);
  auto index_of_field = [field, names, key]() -> size_t {
    for (size_t i = 0; i < names.size(); ++i) {
      if (names[i].second == *field) return i;
    }
    throw InternalError("the value of " + key + " has no name");
  };
  add_names(
      std::move(key), std::move(texts), std::move(help),
      [field, names](size_t index) { *field = names[index].second; }, index_of_field);
}

}  // namespace tessera
