#include "model/run/saved_policy.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <set>
#include <string_view>

#include "core/error.h"
#include "core/text/names.h"

namespace tessera {
namespace {

constexpr std::string_view kRecompute = "train.recompute";
constexpr std::string_view kOffload = "train.offload";

[[noreturn]] void refuse_entry(std::string_view key, const std::string& text,
                               const std::string& why) {
  throw UserError(
      fmt::format("{} has '{}', {}; an entry is the name of a value, or \"all\", "
                  "perhaps with layers: \"expert_pre\", \"expert_pre@3\", \"all@0-5\"",
                  key, text, why));
}

int64_t parse_layer(std::string_view key, const std::string& text, std::string_view number) {
  int64_t layer = 0;
  const char* const end = number.data() + number.size();
  const auto [at, error] = std::from_chars(number.data(), end, layer);
  if (number.empty() || error != std::errc() || at != end || layer < 0)
    refuse_entry(key, text, fmt::format("in which '{}' is no layer", number));
  return layer;
}

SavedEntry parse_entry(std::string_view key, const std::string& text) {
  const size_t at = text.find('@');
  SavedEntry entry{.name = text.substr(0, at)};
  if (entry.name.empty()) refuse_entry(key, text, "which names no value");
  if (at == std::string::npos) return entry;
  const std::string_view range = std::string_view(text).substr(at + 1);
  const size_t dash = range.find('-');
  const int64_t first = parse_layer(key, text, range.substr(0, dash));
  const int64_t last =
      dash == std::string_view::npos ? first : parse_layer(key, text, range.substr(dash + 1));
  if (last < first) refuse_entry(key, text, "whose layers end before they begin");
  entry.layers = {first, last};
  return entry;
}

std::vector<SavedEntry> parse_entries(std::string_view key, const std::vector<std::string>& texts) {
  std::vector<SavedEntry> entries;
  entries.reserve(texts.size());
  for (const std::string& text : texts) entries.push_back(parse_entry(key, text));
  return entries;
}

/// The names of an entry's layers.
std::vector<std::string> names_in(const SavedEntry& entry,
                                  const std::vector<std::set<std::string>>& of_layers) {
  std::set<std::string> names;
  for (size_t layer = 0; layer < of_layers.size(); ++layer) {
    if (entry.covers(static_cast<int64_t>(layer)))
      names.insert(of_layers[layer].begin(), of_layers[layer].end());
  }
  return {names.begin(), names.end()};
}

void check_layers(std::string_view key, const SavedEntry& entry, size_t num_layers) {
  require(!entry.layers || entry.layers->last < static_cast<int64_t>(num_layers),
          "{} has '{}', but the model has layers 0 to {}", key, entry.to_string(), num_layers - 1);
}

/// Whether a layer both keeps a value elsewhere and computes it again.
bool both_name(const SavedPolicy& policy, const SavedEntry& offloaded, int64_t layer) {
  if (offloaded.name == "all" || !offloaded.covers(layer)) return false;
  return std::ranges::any_of(policy.recompute, [&](const SavedEntry& entry) {
    return entry.name == offloaded.name && entry.covers(layer);
  });
}

void check_kept(const SavedEntry& entry, const std::vector<std::set<std::string>>& kept) {
  const std::vector<std::string> list = names_in(entry, kept);
  if (entry.name == "all" || std::ranges::binary_search(list, entry.name)) return;
  throw UserError(fmt::format(
      "train.offload has '{}', but no layer {}keeps a value of this name for its backward pass{}; "
      "kept are {}",
      entry.to_string(), entry.layers ? "of these " : "", did_you_mean(entry.name, list),
      fmt::join(list, ", ")));
}

}  // namespace

std::string SavedEntry::to_string() const {
  if (!layers) return name;
  if (layers->first == layers->last) return fmt::format("{}@{}", name, layers->first);
  return fmt::format("{}@{}-{}", name, layers->first, layers->last);
}

std::vector<SavedEntry> parse_recompute(const std::vector<std::string>& texts) {
  return parse_entries(kRecompute, texts);
}

std::vector<SavedEntry> parse_offload(const std::vector<std::string>& texts) {
  return parse_entries(kOffload, texts);
}

std::vector<std::string> names_of_layer(const std::vector<SavedEntry>& entries, int64_t layer) {
  std::set<std::string> names;
  for (const SavedEntry& entry : entries) {
    if (entry.covers(layer)) names.insert(entry.name);
  }
  if (names.contains("all")) return {"all"};
  return {names.begin(), names.end()};
}

void check_recompute(const SavedPolicy& policy, const std::vector<std::set<std::string>>& values) {
  for (const SavedEntry& entry : policy.recompute) {
    check_layers(kRecompute, entry, values.size());
    std::vector<std::string> list = names_in(entry, values);
    if (entry.name == "all" || std::ranges::binary_search(list, entry.name)) continue;
    list.emplace_back("all");
    throw UserError(fmt::format(
        "train.recompute names '{}', which is no value of {}{}; `tessera inspect --program` lists "
        "them",
        entry.to_string(), entry.layers ? "these layers" : "a layer",
        did_you_mean(entry.name, list)));
  }
}

void check_offload(const SavedPolicy& policy, const std::vector<std::set<std::string>>& kept) {
  for (const SavedEntry& entry : policy.offload.entries) {
    for (int64_t layer = 0; layer < std::ssize(kept); ++layer) {
      require(!both_name(policy, entry, layer),
              "train.offload and train.recompute both name '{}': what is computed again is not "
              "kept anywhere; leave it out of one of them",
              entry.name);
    }
    check_layers(kOffload, entry, kept.size());
    check_kept(entry, kept);
  }
}

}  // namespace tessera
