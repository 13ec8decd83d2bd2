#include "data/text/tokenize_state.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/error.h"
#include "core/file/file.h"
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
                                   skipped_lines, first_skipped, content)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(TextLook, times, at_ns, is_settled)

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr int64_t kStateVersion = 3;

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

/// Fractions would be cut, and what is too large become anything.
bool has_only_integers(const Json& json) {
  if (json.is_number_float()) return false;
  return std::ranges::all_of(json, [](const Json& member) {
    return !member.is_structured() ? !member.is_number_float() : has_only_integers(member);
  });
}

/// Whether this program can have written such a state, for this many files.
bool is_possible(const TokenizeState& state, int64_t num_files) {
  constexpr int64_t kMost = int64_t{1} << 56;  // so that bytes of tokens do not overflow
  const TextPosition& position = state.position;
  const TokenCounts& counts = state.counts;
  const std::array numbers = {
      position.file,          position.offset,        position.line,
      counts.num_tokens,      counts.num_sequences,   counts.num_documents,
      counts.sequence_tokens, counts.document_tokens, counts.document_sequences,
      state.damage.count,     state.damage.first,     state.text_bytes,
      state.silent_tokens,    state.blank_documents,  state.skipped_lines};
  const auto in_range = [](int64_t number) { return number >= 0 && number <= kMost; };
  return std::ranges::all_of(numbers, in_range) && position.file <= num_files &&
         counts.sequence_tokens <= counts.document_tokens &&
         counts.document_tokens <= counts.num_tokens &&
         counts.document_sequences <= counts.num_sequences &&
         counts.num_documents <= counts.num_sequences && state.silent_tokens <= counts.num_tokens;
}

/// A state under `key`, beside what it was made of and how the files looked.
std::optional<FoundState> read_found(const Json& json, const char* key, const Json& description) {
  try {
    const Json& state = json.at(key);
    if (!has_only_integers(state)) return std::nullopt;
    FoundState found{state.get<TokenizeState>(), find_difference(json.at("made_of"), description),
                     json.at("look").get<TextLook>()};
    if (!is_possible(found.state, description.at("num_files").get<int64_t>())) return std::nullopt;
    return found;
  } catch (const Json::exception&) {
    return std::nullopt;
  }
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

uint64_t chain_content(uint64_t before, uint64_t chunk_hash) {
  return mix(before, chunk_hash);
}

TextLook look_at(const std::vector<TextFile>& files) {
  constexpr int64_t kMarginNs =
      2'000'000'000;  // clocks differ, and some file systems count seconds
  TextLook look;
  look.at_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(
                   std::chrono::system_clock::now().time_since_epoch())
                   .count();
  uint64_t times = 0;
  int64_t newest = 0;
  for (const TextFile& file : files) {
    times = mix(mix(times, static_cast<uint64_t>(file.modified_ns)),
                static_cast<uint64_t>(file.changed_ns));
    newest = std::max(newest, file.changed_ns);
  }
  look.times = fmt::format("{:016x}", times);
  look.is_settled = newest < look.at_ns - kMarginNs;
  return look;
}

std::string describe_tokens(const TextSource& source, const Tokenizer& tokenizer,
                            const std::vector<TextFile>& files) {
  uint64_t listing = 0;
  int64_t num_bytes = 0;
  for (const TextFile& file : files) {
    listing = mix(listing, hash(file.path.string()));
    listing = mix(listing, static_cast<uint64_t>(file.num_bytes));
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

void save_state(const fs::path& folder, const std::string& description, const TokenizeState& state,
                const TextLook& look) {
  replace_file(
      state_path(folder),
      dump({{"made_of", Json::parse(description)}, {"state", Json(state)}, {"look", Json(look)}}));
}

std::optional<FoundState> load_state(const fs::path& folder, const std::string& description) {
  const auto json = read_own_json(state_path(folder));
  if (!json) return std::nullopt;
  return read_found(*json, "state", Json::parse(description));
}

fs::path description_path(const std::string& prefix) {
  return prefix + ".json";
}

void save_description(const std::string& prefix, const std::string& description,
                      const TokenizeState& state, const TextLook& look) {
  replace_file(
      description_path(prefix),
      dump({{"made_of", Json::parse(description)}, {"result", Json(state)}, {"look", Json(look)}}));
}

std::optional<FinishedTokens> find_finished(const std::string& prefix,
                                            const std::string& description, int64_t vocab_size) {
  try {
    const auto json = read_own_json(description_path(prefix));
    if (!json) return std::nullopt;
    auto found = read_found(*json, "result", Json::parse(description));
    if (!found || !found->difference.empty()) return std::nullopt;
    const TokenFile file(prefix, vocab_size);
    if (file.num_tokens() != found->state.counts.num_tokens) return std::nullopt;
    TokenizeSummary summary = summarize(prefix, found->state);
    summary.reused = true;
    return FinishedTokens{std::move(summary), std::move(*found)};
  } catch (const UserError&) {
    return std::nullopt;  // unreadable or damaged: written anew
  }
}

}  // namespace tessera
