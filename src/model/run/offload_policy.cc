#include "model/run/offload_policy.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <set>

#include "core/error.h"
#include "core/text/names.h"

namespace tessera {
namespace {

[[noreturn]] void refuse_entry(const std::string& text, const std::string& why) {
  throw UserError(fmt::format(
      "train.offload has '{}', {}; an entry is the name of a value, or \"all\", perhaps "
      "with layers: \"expert_pre\", \"expert_pre@3\", \"all@0-5\"",
      text, why));
}

int64_t parse_layer(const std::string& text, std::string_view number) {
  int64_t layer = 0;
  const char* const end = number.data() + number.size();
  const auto [at, error] = std::from_chars(number.data(), end, layer);
  if (number.empty() || error != std::errc() || at != end || layer < 0)
    refuse_entry(text, fmt::format("in which '{}' is no layer", number));
  return layer;
}

OffloadEntry parse_entry(const std::string& text) {
  const size_t at = text.find('@');
  OffloadEntry entry{.name = text.substr(0, at)};
  if (entry.name.empty()) refuse_entry(text, "which names no value");
  if (at == std::string::npos) return entry;
  const std::string_view range = std::string_view(text).substr(at + 1);
  const size_t dash = range.find('-');
  const int64_t first = parse_layer(text, range.substr(0, dash));
  const int64_t last =
      dash == std::string_view::npos ? first : parse_layer(text, range.substr(dash + 1));
  if (last < first) refuse_entry(text, "whose layers end before they begin");
  entry.layers = {first, last};
  return entry;
}

bool covers(const OffloadEntry& entry, int64_t layer) {
  return !entry.layers || (entry.layers->first <= layer && layer <= entry.layers->last);
}

void check_entry(const OffloadEntry& entry, const std::vector<std::set<std::string>>& kept) {
  std::set<std::string> names;
  for (size_t layer = 0; layer < kept.size(); ++layer) {
    if (covers(entry, static_cast<int64_t>(layer)))
      names.insert(kept[layer].begin(), kept[layer].end());
  }
  if (entry.name == "all" || names.contains(entry.name)) return;
  const std::vector<std::string> list(names.begin(), names.end());
  throw UserError(fmt::format(
      "train.offload has '{}', but no layer {}keeps a value of this name for its backward pass{}; "
      "kept are {}",
      entry.to_string(), entry.layers ? "of these " : "", did_you_mean(entry.name, list),
      fmt::join(list, ", ")));
}

}  // namespace

std::string OffloadEntry::to_string() const {
  if (!layers) return name;
  if (layers->first == layers->last) return fmt::format("{}@{}", name, layers->first);
  return fmt::format("{}@{}-{}", name, layers->first, layers->last);
}

std::vector<OffloadEntry> parse_offload(const std::vector<std::string>& texts) {
  std::vector<OffloadEntry> entries;
  entries.reserve(texts.size());
  for (const std::string& text : texts) entries.push_back(parse_entry(text));
  return entries;
}

std::vector<std::string> offloaded_names(const OffloadPolicy& policy, int64_t layer) {
  std::set<std::string> names;
  for (const OffloadEntry& entry : policy.entries) {
    if (covers(entry, layer)) names.insert(entry.name);
  }
  if (names.contains("all")) return {"all"};
  return {names.begin(), names.end()};
}

void check_offload(const SavedPolicy& policy, const std::vector<std::set<std::string>>& kept) {
  for (const OffloadEntry& entry : policy.offload.entries) {
    const bool again = entry.name != "all" &&
                       std::ranges::find(policy.recompute, entry.name) != policy.recompute.end();
    require(!again,
            "train.offload and train.recompute both name '{}': what is computed again is not kept "
            "anywhere; leave it out of one of them",
            entry.name);
    require(!entry.layers || entry.layers->last < std::ssize(kept),
            "train.offload has '{}', but the model has layers 0 to {}", entry.to_string(),
            kept.size() - 1);
    check_entry(entry, kept);
  }
}

}  // namespace tessera
