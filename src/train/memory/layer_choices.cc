#include "train/memory/layer_choices.h"

namespace tessera {

std::vector<LayerEntry> list_entries(const LayerChoices& choices,
                                     std::vector<std::string> LayerChoice::*names,
                                     int64_t num_layers) {
  std::map<std::string, std::vector<LayerEntry::Layers>> ranges;
  for (const auto& [layer, choice] : choices) {
    for (const std::string& name : choice.*names) {
      std::vector<LayerEntry::Layers>& own = ranges[name];
      if (own.empty() || own.back().last != layer - 1) {
        own.push_back({layer, layer});
      } else {
        own.back().last = layer;
      }
    }
  }
  std::vector<LayerEntry> entries;
  for (const auto& [name, own] : ranges) {
    for (const LayerEntry::Layers& range : own) {
      LayerEntry entry{.name = name};
      if (range.first > 0 || range.last < num_layers - 1) entry.layers = range;
      entries.push_back(std::move(entry));
    }
  }
  return entries;
}

SavedPolicy make_policy(const SavedPolicy& base, const LayerChoices& choices, int64_t num_layers) {
  SavedPolicy policy = base;
  const auto add = [&](std::vector<LayerEntry>& to, std::vector<std::string> LayerChoice::*names) {
    for (LayerEntry& entry : list_entries(choices, names, num_layers))
      to.push_back(std::move(entry));
  };
  add(policy.recompute, &LayerChoice::recompute);
  add(policy.offload.entries, &LayerChoice::offload);
  return policy;
}

}  // namespace tessera
