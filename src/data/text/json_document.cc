#include "data/text/json_document.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "core/config/strict_json.h"
#include "core/error.h"
#include "core/text/names.h"
#include "data/text/text_check.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

constexpr int kMaxDepth = 64;
constexpr const char* kWhere = "the line";

/// Looks for one string of an object and builds nothing else: several times as fast as a tree.
class StringFinder final : public nlohmann::json_sax<Json> {
 public:
  explicit StringFinder(const std::string& key) : wanted_(key) {}

  bool null() override { return scalar("null"); }
  bool boolean(bool) override { return scalar("a boolean"); }
  bool number_integer(number_integer_t) override { return scalar("a number"); }
  bool number_unsigned(number_unsigned_t) override { return scalar("a number"); }
  bool number_float(number_float_t, const string_t&) override { return scalar("a number"); }
  bool binary(binary_t&) override { return scalar("binary"); }
  bool string(string_t& value) override {
    if (!scalar("")) return false;
    if (std::exchange(is_wanted_, false)) text = std::move(value);
    return true;
  }
  bool start_object(size_t) override { return open("an object"); }
  bool start_array(size_t) override { return open("an array"); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    is_wanted_ = depth_ == 1 && name == wanted_;
    if (!is_wanted_) return true;
    require(!found_, "the key '{}' is there twice", wanted_);
    found_ = true;
    return true;
  }
  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    const std::string what = error.what();
    const size_t detail = what.find(": ");
    user_error("no JSON: column {}: {}", position,
               detail == std::string::npos ? what : what.substr(detail + 2));
  }

  std::optional<std::string> text;

 private:
  /// `kind` is what stands there, "" for a string.
  bool scalar(std::string_view kind) {
    require(depth_ > 0, "an object is expected, such as {{\"{}\": \"...\"}}", wanted_);
    require(!is_wanted_ || kind.empty(), "'{}' is {}; a string is expected", wanted_, kind);
    return true;
  }
  bool open(std::string_view kind) {
    if (depth_ > 0 || kind == "an array") scalar(kind);
    ++depth_;
    return true;
  }
  bool close() {
    --depth_;
    return true;
  }

  const std::string& wanted_;
  int64_t depth_ = 0;
  bool is_wanted_ = false;
  bool found_ = false;
};

std::string find_text(std::string_view line, const std::string& key) {
  StringFinder finder(key);
  Json::sax_parse(line.begin(), line.end(), &finder);
  require(finder.text.has_value(), "there is no '{}'; name the key of the text", key);
  return *std::move(finder.text);
}

std::string take_string(const Json& object, const char* key) {
  require(object.contains(key), "there is no '{}'", key);
  require(object[key].is_string(), "'{}' is {}; a string is expected", key,
          object[key].type_name());
  return object[key].get<std::string>();
}

std::vector<DocumentPart> read_completion(const Json& object) {
  std::string completion = take_string(object, "completion");
  require(!completion.empty(), "the completion is empty: there is nothing to learn");
  return {{take_string(object, "prompt"), false, false}, {std::move(completion), true, true}};
}

std::string take_role(const Json& message) {
  static const std::vector<std::string> kRoles = {"system",    "developer", "user",
                                                  "assistant", "tool",      "function"};
  std::string role = take_string(message, "role");
  require(std::ranges::find(kRoles, role) != kRoles.end(), "unknown role {}{}",
          quote_for_message(role), did_you_mean(role, kRoles));
  return role;
}

std::vector<DocumentPart> read_messages(const Json& messages) {
  require(messages.is_array() && !messages.empty(),
          "'messages' is no list of messages {{\"role\": ..., \"content\": ...}}");
  std::vector<DocumentPart> parts;
  std::string silent;  // text without loss since the last turn of the assistant
  for (const Json& message : messages) {
    require(message.is_object(), "a message is {}; an object is expected", message.type_name());
    const std::string role = take_role(message);
    std::string content = take_string(message, "content");
    silent += fmt::format("<|{}|>\n", role);
    if (role == "assistant") {
      parts.push_back({std::exchange(silent, ""), false, false});
      parts.push_back({std::move(content), true, true});
    } else {
      silent += content + "\n";
    }
  }
  require(!parts.empty(), "no message is the assistant's: there is nothing to learn");
  if (!silent.empty()) parts.push_back({std::move(silent), false, true});
  return parts;
}

/// Calls `use` for each line that is not blank, with its number from 1.
void for_each_line(const TextChunk& chunk,
                   const std::function<void(std::string_view line, int64_t number)>& use) {
  std::string_view text = chunk.text;
  int64_t number = chunk.begin.line;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    ++number;
    if (!is_blank(text.substr(0, end))) use(text.substr(0, end), number);
    text.remove_prefix(std::min(end + 1, text.size()));
  }
}

std::vector<DocumentPart> read_instruction(std::string_view line) {
  const Json object = parse_strict_json(line, kWhere, kMaxDepth);
  require(object.is_object(), "an object is expected, found {}", object.type_name());
  if (object.contains("messages")) return read_messages(object["messages"]);
  require(object.contains("prompt") || object.contains("completion"),
          "there is neither 'messages' nor 'prompt' and 'completion'");
  return read_completion(object);
}

}  // namespace

std::vector<DocumentPart> parse_json_document(std::string_view line, const TextSource& source) {
  if (source.instructions) return read_instruction(line);
  std::vector<DocumentPart> parts;
  parts.push_back({find_text(line, source.json_key), true, true});
  return parts;
}

SkippedLines for_each_json_document(
    const TextChunk& chunk, const std::filesystem::path& path, const TextSource& source,
    const std::function<void(const std::vector<DocumentPart>&)>& use) {
  SkippedLines skipped;
  const auto refuse = [&](int64_t number, const char* reason) {
    std::string message = fmt::format("{}: line {}: {}", path.string(), number, reason);
    if (!source.skip_invalid) throw UserError(message);
    if (skipped.count++ == 0) skipped.first = std::move(message);
  };
  if (chunk.too_long) {
    refuse(chunk.begin.line + 1, "too long to be held; put such a text into a file of its own");
  }
  for_each_line(chunk, [&](std::string_view line, int64_t number) {
    try {
      use(parse_json_document(line, source));
    } catch (const UserError& error) {
      refuse(number, error.what());
    }
  });
  return skipped;
}

}  // namespace tessera
