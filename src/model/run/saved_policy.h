#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "program/compile/recompute.h"

namespace tessera {

/// A value of layers: what one entry of train.recompute or train.offload names.
struct SavedEntry {
  std::string name;  ///< of the value; "all": everything that a layer keeps
  /// Layers counted in the model, those of multi-token prediction behind; both ends included.
  struct Layers {
    int64_t first = 0;
    int64_t last = 0;
  };
  std::optional<Layers> layers = std::nullopt;  ///< all layers where it is not set

  bool covers(int64_t layer) const {
    return !layers || (layers->first <= layer && layer <= layers->last);
  }
  std::string to_string() const;
};

/// What waits in the host's memory between the passes.
struct OffloadPolicy {
  std::vector<SavedEntry> entries = {};
  /// What the way to the host's memory carries in a second, each way at the same time. Copies are
  /// planned with it.
  double link_bytes = 50e9;
};

/// What a layer's values do between the passes if they are not simply kept.
struct SavedPolicy {
  std::vector<SavedEntry> recompute = {};
  OffloadPolicy offload = {};
};

/// Read entries such as "expert_pre", "expert_pre@3" and "all@0-5". Throw UserError for what is
/// none.
std::vector<SavedEntry> parse_recompute(const std::vector<std::string>& texts);
std::vector<SavedEntry> parse_offload(const std::vector<std::string>& texts);

/// The names that entries have for a layer, sorted, each once; {"all"} where that is among them.
std::vector<std::string> names_of_layer(const std::vector<SavedEntry>& entries, int64_t layer);

/// `values` has the names of the values of each layer of the model. Throws UserError for an entry
/// that none of its layers has, with the nearest name, and for layers that the model lacks.
void check_recompute(const SavedPolicy& policy, const std::vector<std::set<std::string>>& values);

/// `kept` has the names of the values that each layer of the model keeps. Throws UserError for an
/// entry that none of its layers keeps, with the nearest name and a list, or that one of them
/// computes again instead, and for layers that the model lacks.
void check_offload(const SavedPolicy& policy, const std::vector<std::set<std::string>>& kept);

}  // namespace tessera
