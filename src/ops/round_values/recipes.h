#pragma once

#include <optional>
#include <span>
#include <string_view>

#include "ops/round_values/cast_spec.h"

namespace tessera {

/// How the operands of a layer's products are rounded. A product adds up features (forward, and the
/// gradient of its input) or tokens (the gradient of its weight).
struct Recipe {
  std::string_view name;
  std::string_view what;  ///< in one line
  CastSpec activation;
  CastSpec weight;
  CastSpec gradient;
  CastSpec token_activation;
  CastSpec token_gradient;
  /// All operands are F16, without scales; the casts say nothing.
  bool is_f16 = false;

  /// Whether scales are of earlier steps.
  bool is_delayed() const { return activation.delayed; }
};

/// tensorwise, tensorwise_delayed, rowwise, blockwise, mxfp8, nvfp4.
std::span<const Recipe> recipes();
/// FP16 (train.precision = "fp16"), which is none of those.
const Recipe& f16_recipe();
/// Throws UserError for another name, with the nearest.
const Recipe& find_recipe(std::string_view name);
/// The recipe itself, or where its scales are of earlier steps the one that rounds to the same
/// numbers by scales of the values at hand.
const Recipe& at_hand(const Recipe& recipe);

}  // namespace tessera
