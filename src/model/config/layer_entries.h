#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// Something of layers: what one entry of a list such as train.recompute names.
struct LayerEntry {
  std::string name;  ///< "all": everything of its kind
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

/// How an option's entries are written, for its messages.
struct LayerEntryKind {
  std::string_view key;       ///< of the option
  std::string_view names;     ///< "value", "weight"
  std::string_view examples;  ///< "\"expert_pre\", \"expert_pre@3\", \"all@0-5\""
};

/// Reads entries such as "expert_pre", "expert_pre@3" and "all@0-5". Throws UserError for what is
/// none.
std::vector<LayerEntry> parse_layer_entries(const LayerEntryKind& kind,
                                            const std::vector<std::string>& texts);

/// The names that entries have for a layer, sorted, each once; {"all"} where that is among them.
std::vector<std::string> names_of_layer(const std::vector<LayerEntry>& entries, int64_t layer);

/// Throws UserError where the entry has layers that the model lacks.
void check_layers(std::string_view key, const LayerEntry& entry, int64_t num_layers);

}  // namespace tessera
