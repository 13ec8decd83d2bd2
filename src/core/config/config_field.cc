#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "core/config/config.h"
#include "core/config/config_toml.h"
#include "core/text/names.h"
#include "core/text/utf8.h"

// Binding configuration values to typed fields: conversion, checks and their messages.

namespace tessera {
namespace {

constexpr std::string_view kUnset = "none";

template <typename T>
struct IsOptional : std::false_type {};
template <typename T>
struct IsOptional<std::optional<T>> : std::true_type {};
template <typename T>
struct IsList : std::false_type {};
template <typename T>
struct IsList<std::vector<T>> : std::true_type {};

/// "an integer": the article and name of a field's type.
template <typename T>
std::string type_name() {
  if constexpr (IsOptional<T>::value) {
    return type_name<typename T::value_type>() + " or \"none\"";
  } else if constexpr (std::is_same_v<T, bool>) {
    return "true or false";
  } else if constexpr (std::is_same_v<T, int64_t>) {
    return "an integer";
  } else if constexpr (std::is_same_v<T, double>) {
    return "a number";
  } else if constexpr (std::is_same_v<T, std::string>) {
    return "a string";
  } else if constexpr (std::is_same_v<T, std::vector<int64_t>>) {
    return "a list of integers";
  } else if constexpr (std::is_same_v<T, std::vector<double>>) {
    return "a list of numbers";
  } else {
    return "a list of strings";
  }
}

/// A string as TOML, cut short at a character's border where it is long.
std::string short_text(const std::string& text) {
  constexpr size_t kLongest = 60;
  if (text.size() <= kLongest) return toml_text(ConfigScalar(text));
  const std::string_view start = std::string_view(text).substr(0, kLongest);
  return toml_text(ConfigScalar(std::string(start.substr(0, valid_utf8_prefix(start))))) + "...";
}

struct Description {
  std::string operator()(bool value) const { return value ? "true" : "false"; }
  std::string operator()(int64_t value) const { return fmt::format("the integer {}", value); }
  std::string operator()(double value) const {
    return "the number " + toml_text(ConfigScalar(value));
  }
  std::string operator()(const std::string& value) const {
    return "the string " + short_text(value);
  }
  std::string operator()(const std::vector<ConfigScalar>&) const { return "a list"; }
};

std::string check_text(const std::string& text) {
  if (valid_utf8_prefix(text) != text.size()) return "must be valid UTF-8, found other bytes";
  // The TOML reader keeps this plane for itself (config_toml.cc).
  for (size_t at = text.find('\xF3'); at != std::string::npos; at = text.find('\xF3', at + 1)) {
    if ((text[at + 1] & 0x30) == 0x30) return "must not hold characters of the plane U+F0000";
  }
  if (text.find('\0') != std::string::npos) return "must not hold a NUL character";
  return "";
}

std::string check_range(double value, const ConfigScalar& found, const Range& range) {
  if (range.contains(value)) return "";
  std::string expected = range.to_string();
  if (!std::isfinite(value))
    expected = "a finite number" + (expected.empty() ? "" : " " + expected);
  return fmt::format("must be {}, found {}", expected, toml_text(found));
}

std::string store_scalar(bool& field, const ConfigScalar& value, const Range&) {
  field = std::get<bool>(value);
  return "";
}

std::string store_scalar(int64_t& field, const ConfigScalar& value, const Range& range) {
  const auto number = std::get<int64_t>(value);
  std::string problem = check_range(static_cast<double>(number), value, range);
  if (problem.empty()) field = number;
  return problem;
}

std::string store_scalar(double& field, const ConfigScalar& value, const Range& range) {
  const auto* whole = std::get_if<int64_t>(&value);
  const double number = whole != nullptr ? static_cast<double>(*whole) : std::get<double>(value);
  std::string problem = check_range(number, value, range);
  if (problem.empty()) field = number;
  return problem;
}

std::string store_scalar(std::string& field, const ConfigScalar& value, const Range&) {
  const auto& text = std::get<std::string>(value);
  std::string problem = check_text(text);
  if (problem.empty()) field = text;
  return problem;
}

template <typename T>
bool has_type(const ConfigScalar& value) {
  return std::holds_alternative<T>(value) ||
         (std::is_same_v<T, double> && std::holds_alternative<int64_t>(value));
}

template <typename T>
std::string wrong_type(const ConfigValue& value) {
  return fmt::format("must be {}, found {}", type_name<T>(), std::visit(Description{}, value));
}

template <typename T>
std::string store_list(std::vector<T>& field, const ConfigValue& value, const Range& range) {
  const auto* elements = std::get_if<std::vector<ConfigScalar>>(&value);
  if (elements == nullptr) return wrong_type<std::vector<T>>(value);
  std::vector<T> list(elements->size());
  for (size_t i = 0; i < list.size(); ++i) {
    const ConfigScalar& element = (*elements)[i];
    if (!has_type<T>(element)) {
      return fmt::format("must be {}, found {} in the list", type_name<std::vector<T>>(),
                         std::visit(Description{}, element));
    }
    std::string problem = store_scalar(list[i], element, range);
    if (!problem.empty()) return problem;
  }
  field = std::move(list);
  return "";
}

/// Stores the value in the field, or says what is wrong with it, calling the type expected Named.
template <typename T, typename Named = T>
std::string store(T& field, const ConfigValue& value, const Range& range) {
  if constexpr (IsList<T>::value) {
    return store_list(field, value, range);
  } else if constexpr (IsOptional<T>::value) {
    const auto* text = std::get_if<std::string>(&value);
    if (text != nullptr && *text == kUnset) {
      field.reset();
      return "";
    }
    typename T::value_type inner{};
    std::string problem = store<typename T::value_type, T>(inner, value, range);
    if (problem.empty()) field = std::move(inner);
    return problem;
  } else {
    const auto scalar = std::visit(
        [](const auto& v) -> std::optional<ConfigScalar> {
          if constexpr (std::is_constructible_v<ConfigScalar, decltype(v)>) return ConfigScalar(v);
          return std::nullopt;
        },
        value);
    if (!scalar || !has_type<T>(*scalar)) return wrong_type<Named>(value);
    return store_scalar(field, *scalar, range);
  }
}

template <typename T>
ConfigValue value_of(const T& field) {
  if constexpr (IsOptional<T>::value) {
    return field ? value_of(*field) : ConfigValue(std::string(kUnset));
  } else if constexpr (IsList<T>::value) {
    return std::vector<ConfigScalar>(field.begin(), field.end());
  } else {
    return field;
  }
}

template <typename T>
struct Inner {
  using Type = T;
};
template <typename T>
struct Inner<std::optional<T>> {
  using Type = T;
};
template <typename T>
struct Inner<std::vector<T>> {
  using Type = T;
};

}  // namespace

template <typename T>
void ConfigSchema::add(std::string key, T* field, std::string help, Range range) {
  using Element = typename Inner<T>::Type;
  add_field(
      {.key = std::move(key),
       .help = std::move(help),
       .type = type_name<T>(),
       .limit = range.to_string(),
       .is_list = IsList<T>::value,
       .is_optional = IsOptional<T>::value,
       .is_text = std::is_same_v<Element, std::string>,
       .is_number = std::is_same_v<Element, double> || std::is_same_v<Element, int64_t>,
       .is_integer = std::is_same_v<Element, int64_t>,
       .range = range,
       .set = [field, range](const ConfigValue& value) { return store(*field, value, range); },
       .get = [field] { return value_of(*field); }});
}

template void ConfigSchema::add(std::string, bool*, std::string, Range);
template void ConfigSchema::add(std::string, int64_t*, std::string, Range);
template void ConfigSchema::add(std::string, double*, std::string, Range);
template void ConfigSchema::add(std::string, std::string*, std::string, Range);
template void ConfigSchema::add(std::string, std::vector<int64_t>*, std::string, Range);
template void ConfigSchema::add(std::string, std::vector<double>*, std::string, Range);
template void ConfigSchema::add(std::string, std::vector<std::string>*, std::string, Range);
template void ConfigSchema::add(std::string, std::optional<bool>*, std::string, Range);
template void ConfigSchema::add(std::string, std::optional<int64_t>*, std::string, Range);
template void ConfigSchema::add(std::string, std::optional<double>*, std::string, Range);
template void ConfigSchema::add(std::string, std::optional<std::string>*, std::string, Range);

void ConfigSchema::add_names(std::string key, std::vector<std::string> names, std::string help,
                             std::function<void(size_t)> set_index,
                             std::function<size_t()> get_index) {
  std::vector<std::string> shown = names;
  std::ranges::replace(shown, std::string(), std::string(R"("")"));
  const std::string type = fmt::format("one of {}", fmt::join(shown, ", "));
  auto set = [names, type, set_index = std::move(set_index)](const ConfigValue& value) {
    const auto* text = std::get_if<std::string>(&value);
    const std::string found = std::visit(Description{}, value);
    if (text == nullptr) return fmt::format("must be {}, found {}", type, found);
    const auto at = std::ranges::find(names, *text);
    if (at == names.end()) {
      return fmt::format("must be {}, found {}{}", type, found, did_you_mean(*text, names));
    }
    set_index(at - names.begin());
    return std::string();
  };
  auto get = [names, get_index = std::move(get_index)] { return ConfigValue(names[get_index()]); };
  add_field({.key = std::move(key),
             .help = std::move(help),
             .type = type,
             .is_text = true,
             .set = std::move(set),
             .get = std::move(get)});
}

void ConfigSchema::add_choice(std::string key, std::string* field, std::vector<std::string> names,
                              std::string help) {
  auto get_index = [names, field, key] {
    const auto at = std::ranges::find(names, *field);
    ensure(at != names.end(), "{} holds the unknown name '{}'", key, *field);
    return at - names.begin();
  };
  auto set_index = [names, field](size_t index) { *field = names[index]; };
  add_names(std::move(key), names, std::move(help), set_index, get_index);
}

}  // namespace tessera
