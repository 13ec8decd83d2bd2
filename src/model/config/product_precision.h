#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "model/config/layer_entries.h"
#include "program/compile/round_operands.h"

namespace tessera {

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
