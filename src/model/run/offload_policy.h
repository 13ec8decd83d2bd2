#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "program/compile/recompute.h"

namespace tessera {

/// A value of layers that waits in the host's memory between the passes: what one entry of
/// train.offload says.
struct OffloadEntry {
  std::string name;  ///< of the value; "all": everything that a layer keeps
  /// Layers counted in the model, those of multi-token prediction behind; both ends included.
  struct Layers {
    int64_t first = 0;
    int64_t last = 0;
  };
  std::optional<Layers> layers = std::nullopt;  ///< all layers where it is not set

  std::string to_string() const;
};

struct OffloadPolicy {
  std::vector<OffloadEntry> entries = {};
  /// What the way to the host's memory carries in a second, each way at the same time. Copies are
  /// planned with it.
  double link_bytes = 50e9;
};

/// What a layer's values do between the passes if they are not simply kept.
struct SavedPolicy {
  RecomputePolicy recompute = {};
  OffloadPolicy offload = {};
};

/// Reads entries such as "expert_pre", "expert_pre@3" and "all@0-5". Throws UserError for what is
/// none.
std::vector<OffloadEntry> parse_offload(const std::vector<std::string>& texts);

/// The names that the policy has for a layer, sorted, each once; {"all"} where that is among them.
std::vector<std::string> offloaded_names(const OffloadPolicy& policy, int64_t layer);

/// `kept` has the names of the values that each layer of the model keeps. Throws UserError for an
/// entry that none of its layers keeps, with the nearest name and a list, or that is computed again
/// instead, and for layers that the model lacks.
void check_offload(const SavedPolicy& policy, const std::vector<std::set<std::string>>& kept);

}  // namespace tessera
