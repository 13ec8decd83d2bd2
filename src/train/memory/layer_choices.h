#pragma once

#include <map>
#include <string>
#include <vector>

#include "model/run/saved_policy.h"

namespace tessera {

/// What one layer does with its values, beside what it does in any case: names, each once, sorted.
struct LayerChoice {
  std::vector<std::string> recompute = {};
  std::vector<std::string> offload = {};
  bool operator==(const LayerChoice&) const = default;
};

/// By layer of the model.
using LayerChoices = std::map<int64_t, LayerChoice>;

/// Each name with the ranges of neighbouring layers that have it; without layers where all
/// `num_layers` of the model do.
std::vector<LayerEntry> list_entries(const LayerChoices& choices,
                                     std::vector<std::string> LayerChoice::*names,
                                     int64_t num_layers);

/// `base` with all that was chosen.
SavedPolicy make_policy(const SavedPolicy& base, const LayerChoices& choices, int64_t num_layers);

}  // namespace tessera
