#include "model/run/saved_policy.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "core/error.h"
#include "core/text/names.h"

namespace tessera {
namespace {

constexpr std::string_view kExamples = R"("expert_pre", "expert_pre@3", "all@0-5")";
constexpr LayerEntryKind kRecompute{"train.recompute", "value", kExamples};
constexpr LayerEntryKind kOffload{"train.offload", "value", kExamples};

/// The names of an entry's layers.
std::vector<std::string> names_in(const LayerEntry& entry,
                                  const std::vector<std::set<std::string>>& of_layers) {
  std::set<std::string> names;
  for (size_t layer = 0; layer < of_layers.size(); ++layer) {
    if (entry.covers(static_cast<int64_t>(layer)))
      names.insert(of_layers[layer].begin(), of_layers[layer].end());
  }
  return {names.begin(), names.end()};
}

/// Whether a layer both keeps a value elsewhere and computes it again.
bool both_name(const SavedPolicy& policy, const LayerEntry& offloaded, int64_t layer) {
  if (offloaded.name == "all" || !offloaded.covers(layer)) return false;
  return std::ranges::any_of(policy.recompute, [&](const LayerEntry& entry) {
    return entry.name == offloaded.name && entry.covers(layer);
  });
}

void check_kept(const LayerEntry& entry, const std::vector<std::set<std::string>>& kept) {
  const std::vector<std::string> list = names_in(entry, kept);
  if (entry.name == "all" || std::ranges::binary_search(list, entry.name)) return;
  throw UserError(fmt::format(
      "train.offload has '{}', but no layer {}keeps a value of this name for its backward pass{}; "
      "kept are {}",
      entry.to_string(), entry.layers ? "of these " : "", did_you_mean(entry.name, list),
      fmt::join(list, ", ")));
}

}  // namespace

std::vector<LayerEntry> parse_recompute(const std::vector<std::string>& texts) {
  return parse_layer_entries(kRecompute, texts);
}

std::vector<LayerEntry> parse_offload(const std::vector<std::string>& texts) {
  return parse_layer_entries(kOffload, texts);
}

void check_recompute(const SavedPolicy& policy, const std::vector<std::set<std::string>>& values) {
  for (const LayerEntry& entry : policy.recompute) {
    check_layers(kRecompute.key, entry, std::ssize(values));
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
  for (const LayerEntry& entry : policy.offload.entries) {
    for (int64_t layer = 0; layer < std::ssize(kept); ++layer) {
      require(!both_name(policy, entry, layer),
              "train.offload and train.recompute both name '{}': what is computed again is not "
              "kept anywhere; leave it out of one of them",
              entry.name);
    }
    check_layers(kOffload.key, entry, std::ssize(kept));
    check_kept(entry, kept);
  }
}

}  // namespace tessera
