#include "tokenizer/end_of_document.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <nlohmann/json.hpp>

#include "core/config/strict_json.h"
#include "core/error.h"
#include "core/file/file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::array<std::string_view, 8> kWellKnown = {
    "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>",
    "<|eos|>",       "[EOS]",           "<|endofdocument|>"};

int32_t chosen_id(const EndOfDocumentSearch& search) {
  const std::string& choice = search.choice;
  const std::string path = search.path.string();
  if (std::ranges::all_of(choice, [](char c) { return c >= '0' && c <= '9'; })) {
    int64_t id = 0;
    const auto [end, error] = std::from_chars(choice.data(), choice.data() + choice.size(), id);
    require(error == std::errc() && id < search.vocab_size,
            "data.end_of_document is {}, but {} has the ids below {}", choice, path,
            search.vocab_size);
    return static_cast<int32_t>(id);
  }
  const int32_t id = search.find(choice);
  require(id >= 0, "data.end_of_document {} is no token of {}", quote_for_message(choice), path);
  return id;
}

/// The eos_token of the file beside the tokenizer, or "".
std::string configured_token(const fs::path& tokenizer) {
  constexpr int kMaxDepth = 32;
  constexpr int64_t kMaxBytes = int64_t{64} << 20;
  const fs::path path = tokenizer.parent_path() / "tokenizer_config.json";
  if (!path_exists(path)) return {};
  const json config = parse_strict_json(read_text_file(path, kMaxBytes), path.string(), kMaxDepth);
  require(config.is_object(), "{}: expected a JSON object", path.string());
  const json token = config.value("eos_token", json());
  if (token.is_null()) return {};
  return json_text(token.is_object() ? json_member(token, "content", path.string()) : token,
                   "eos_token", path.string());
}

}  // namespace

int32_t find_end_of_document(const EndOfDocumentSearch& search) {
  if (!search.choice.empty()) return chosen_id(search);
  const std::string configured = configured_token(search.path);
  if (!configured.empty()) {
    const int32_t id = search.find(configured);
    require(id >= 0, "the eos_token {} of tokenizer_config.json is no token of {}",
            quote_for_message(configured), search.path.string());
    return id;
  }
  if (search.own >= 0) return search.own;
  for (const std::string_view token : kWellKnown) {
    const int32_t id = search.find(token);
    if (id >= 0) return id;
  }
  user_error(
      "{} has no token that is known to end a document (such as {}); name one with "
      "data.end_of_document",
      search.path.string(), fmt::join(kWellKnown, " "));
}

}  // namespace tessera
