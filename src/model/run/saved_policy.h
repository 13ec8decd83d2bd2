#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "model/config/layer_entries.h"

namespace tessera {

/// What waits in the host's memory between the passes.
struct OffloadPolicy {
  std::vector<LayerEntry> entries = {};
  /// What the way to the host's memory carries in a second, each way at the same time. Copies are
  /// planned with it.
  double link_bytes = 50e9;
};

/// Rows whose number the device alone knows wait in pages of a pool that all layers share (see
/// stash_rows).
struct StashPolicy {
  double factor = 1.25;    ///< room beside what balanced routing needs, at least 1
  int64_t page_rows = 64;  ///< of hidden states, which are a page's bytes
};

/// What a layer's values do between the passes if they are not simply kept.
struct SavedPolicy {
  std::vector<LayerEntry> recompute = {};
  OffloadPolicy offload = {};
  std::optional<StashPolicy> stash = std::nullopt;
};

/// Read entries such as "expert_pre", "expert_pre@3" and "all@0-5". Throw UserError for what is
/// none.
std::vector<LayerEntry> parse_recompute(const std::vector<std::string>& texts);
std::vector<LayerEntry> parse_offload(const std::vector<std::string>& texts);

/// `values` has the names of the values of each layer of the model. Throws UserError for an entry
/// that none of its layers has, with the nearest name, and for layers that the model lacks.
void check_recompute(const SavedPolicy& policy, const std::vector<std::set<std::string>>& values);

/// `kept` has the names of the values that each layer of the model keeps. Throws UserError for an
/// entry that none of its layers keeps, with the nearest name and a list, or that one of them
/// computes again instead, and for layers that the model lacks.
void check_offload(const SavedPolicy& policy, const std::vector<std::set<std::string>>& kept);

}  // namespace tessera
