#include "data/tokenize_state.h"

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/file.h"
#include "core/random.h"
#include "data/token_file.h"

namespace tessera {

// In this namespace, since the macros define functions that are found by their arguments.
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(TextPosition, file, offset, line, at_line, in_document)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(TokenCounts, num_tokens, num_sequences, num_documents,
                                   sequence_tokens, sequence_has_loss, document_tokens,
                                   document_sequences)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(TextDamage, count, first)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(TokenizeState, finishing, position, counts, damage,
                                   document_is_blank, text_bytes, silent_tokens, blank_documents,
                                   skipped_lines, first_skipped)

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr int64_t kStateVersion = 2;

uint64_t hash(const std::string& text) {
  return hash_text(text.data(), text.size());
}

std::string dump(const Json& json) {
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

const char* format_name(TextFormat format) {
  if (format == TextFormat::kAuto) return "auto";
  return format == TextFormat::kText ? "text" : "jsonl";
}

fs::path state_path(const fs::path& folder) {
  return folder / "state.json";
}

/// "tokenizer was "byte" and is "gpt2"" for the first key of `now` that differs.
std::string find_difference(const Json& then, const Json& now) {
  for (const auto& [key, value] : now.items()) {
    const Json old = then.is_object() ? then.value(key, Json()) : Json();
    if (dump(old) == dump(value)) continue;
    if (key == "listing") return "a file has changed";
    return fmt::format("{} was {} and is {}", key,
                       old.dump(-1, ' ', false, Json::error_handler_t::replace),
                       value.dump(-1, ' ', false, Json::error_handler_t::replace));
  }
  return "";
}

/// The JSON of a file that this program has written, or nothing where it is missing or damaged.
std::optional<Json> read_own_json(const fs::path& path) {
  if (!path_exists(path)) return std::nullopt;
  Json json = Json::parse(read_text_file(path), nullptr, false);
  if (!json.is_object()) return std::nullopt;
  return json;
}

TokenizeSummary summarize(const std::string& prefix, const TokenizeState& state) {
  return {.prefix = prefix,
          .num_documents = state.counts.num_documents,
          .num_tokens = state.counts.num_tokens,
          .text_bytes = state.text_bytes,
          .silent_tokens = state.silent_tokens,
          .blank_documents = state.blank_documents,
          .skipped_lines = state.skipped_lines,
          .first_skipped = state.first_skipped};
}

}  // namespace

std::string describe_tokens(const TextSource& source, const Tokenizer& tokenizer,
                            const std::vector<TextFile>& files) {
  uint64_t listing = 0;
  int64_t num_bytes = 0;
  for (const TextFile& file : files) {
    listing = mix(listing, hash(file.path.string()));
    listing = mix(listing, static_cast<uint64_t>(file.num_bytes));
    listing = mix(listing, static_cast<uint64_t>(file.modified_ns));
    num_bytes += file.num_bytes;
  }
  return dump({{"version", kStateVersion},
               {"source", source.name()},
               {"format", format_name(source.format)},
               {"instructions", source.instructions},
               {"json_key", source.json_key},
               {"separator", source.separator_line ? "line:" + *source.separator_line : "none"},
               {"skip_invalid", source.skip_invalid},
               {"tokenizer", tokenizer.name()},
               {"num_files", files.size()},
               {"num_bytes", num_bytes},
               {"listing", fmt::format("{:016x}", listing)}});
}

void save_state(const fs::path& folder, const std::string& description,
                const TokenizeState& state) {
  replace_file(state_path(folder),
               dump({{"made_of", Json::parse(description)}, {"state", Json(state)}}));
}

std::optional<FoundState> load_state(const fs::path& folder, const std::string& description) {
  const auto json = read_own_json(state_path(folder));
  if (!json) return std::nullopt;
  try {
    return FoundState{json->at("state").get<TokenizeState>(),
                      find_difference(json->at("made_of"), Json::parse(description))};
  } catch (const Json::exception&) {
    return std::nullopt;
  }
}

fs::path description_path(const std::string& prefix) {
  return prefix + ".json";
}

void save_description(const std::string& prefix, const std::string& description,
                      const TokenizeState& state) {
  replace_file(description_path(prefix),
               dump({{"made_of", Json::parse(description)}, {"result", Json(state)}}));
}

std::optional<TokenizeSummary> find_finished(const std::string& prefix,
                                             const std::string& description, int64_t vocab_size) {
  try {
    const auto json = read_own_json(description_path(prefix));
    if (!json || !find_difference(json->at("made_of"), Json::parse(description)).empty()) {
      return std::nullopt;
    }
    const auto state = json->at("result").get<TokenizeState>();
    const TokenFile file(prefix, vocab_size);
    if (file.num_tokens() != state.counts.num_tokens) return std::nullopt;
    TokenizeSummary summary = summarize(prefix, state);
    summary.reused = true;
    return summary;
  } catch (const UserError&) {
    return std::nullopt;  // unreadable or damaged: written anew
  } catch (const Json::exception&) {
    return std::nullopt;
  }
}

}  // namespace tessera
