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
};

/// tensorwise, rowwise, blockwise, mxfp8, nvfp4.
std::span<const Recipe> recipes();
/// Throws UserError for another name, with the nearest.
const Recipe& find_recipe(std::string_view name);

}  // namespace tessera
