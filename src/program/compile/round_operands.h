#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ops/round_values/recipes.h"
#include "program/differentiate.h"

namespace tessera {

/// Which products read rounded operands, and how these are rounded.
struct OperandRounding {
  const Recipe* recipe = nullptr;
  /// Weights whose products stay as they are: by name, or by the beginning of it up to a dot
  /// ("moe.experts"); "all" has none rounded.
  std::vector<std::string> plain = {};
  /// The gradients of weights are products of what was not rounded.
  bool plain_weight_gradients = false;
  /// Products that tensor cores can make of FP8 numbers are made so, unless all are to be emulated.
  bool fp8_products = false;

  bool rounds(std::string_view weight) const;
};

/// The names of the weights whose products could be rounded.
std::vector<std::string> product_weights(const Program& forward);

/// Puts a RoundValues in front of each operand of the products of weights (Linear and
/// GroupedMatmul), each value once for all that read it rounded alike. With `fp8_products` it is a
/// Quantize, and the product a ScaledGroupedMatmul, where there is one (find_fp8_product); what
/// else the product adds is then added to its rounded result. Values keep their ids. REQUIRES experts of one size, whose rows are not gathered as they are read.
Program round_operands(const Program& forward, const OperandRounding& rounding);

/// The same for the products that are gradients of these. What is saved stays as it was.
Backward round_operands(const Program& forward, Backward backward, const OperandRounding& rounding);

}  // namespace tessera
