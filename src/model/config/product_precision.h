#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "model/config/layer_entries.h"
#include "program/rounding/round_operands.h"

namespace tessera {

/// Which of the largest values of earlier steps a delayed scale is made of.
enum class AmaxChoice : uint8_t { kMax, kMostRecent };

/// Delayed scales, as Transformer Engine's DelayedScaling has them, but that they are powers of
/// two.
struct DelayedScaling {
  int64_t history = 1024;  ///< steps that are looked back at
  AmaxChoice choice = AmaxChoice::kMax;
  int64_t margin = 0;      ///< powers of two that values may grow by before they saturate
  bool overflows = false;  ///< what saturates makes the step NaN
};

/// What the products of layers' weights read.
struct ProductPrecision {
  /// How operands are rounded; null: they are not.
  const Recipe* recipe = nullptr;
  /// Weights whose products are left as they are, as OperandRounding has them.
  std::vector<LayerEntry> plain = {};
  /// As OperandRounding has them.
  bool plain_weight_gradients = false;
  bool fp8_products = true;
  bool keeps_copies = false;
  bool keeps_rounded = false;
  bool keeps_all_rounded = false;
  bool fp8_weights = false;
  DelayedScaling delayed = {};

  /// Whether the recipe keeps a history of the largest values.
  bool is_delayed() const { return recipe != nullptr && recipe->is_delayed(); }
  /// For layers of which `names` (see names_of_layer) are left as they are.
  std::optional<OperandRounding> rounding(std::vector<std::string> names) const;
};

/// Reads entries such as "attn", "moe.experts.down" and "all@0-1". Throws UserError for what
/// is none.
std::vector<LayerEntry> parse_plain(const std::vector<std::string>& texts);

/// `weights` has the names of those whose products each layer of the model could round. Throws
/// UserError for an entry that no weight of its layers has, with the nearest, and for layers that
/// the model lacks.
void check_plain(const ProductPrecision& precision,
                 const std::vector<std::set<std::string>>& weights);

}  // namespace tessera
