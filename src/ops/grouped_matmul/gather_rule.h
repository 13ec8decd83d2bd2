#pragma once

#include <cstdint>

namespace tessera {

/// Whether a grouped product on a GPU that gathers its rows of H columns as it reads them, rather
/// than find them made, gains more by that than it loses. Making R rows moves 4·R·H bytes once,
/// which the products that share them, of 2·R·H·F operations each, must not lose: they do where
/// experts have many features F, since a gathering product has less of the tensor cores' time to
/// hide behind its copies.
constexpr bool gathered_product_pays(int64_t /*hidden_size*/, int64_t features) {
  constexpr int64_t kMostFeatures = 2048;
  return features <= kMostFeatures;
}

}  // namespace tessera
