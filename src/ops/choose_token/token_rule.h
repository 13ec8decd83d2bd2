#pragma once

#include <cstdint>

namespace tessera {

/// How the next token is chosen from its probabilities: temperature, then the top_k most likely,
/// then the fewest of those whose probabilities reach top_p, renormalised. Of equal probabilities
/// the lower id comes first.
struct TokenRule {
  static constexpr int32_t kChoose = -1;
  static constexpr int32_t kNothing = -2;

  double temperature = 1;  ///< 0: always the most likely
  double top_p = 1;
  uint64_t uniform = 0;    ///< 53 random bits, which draw from [0, 1)
  int32_t top_k = 0;       ///< 0: all
  int32_t vocab_size = 0;  ///< only ids below it are chosen; 0: all
  /// The token whose probability alone is wanted, if not kChoose; kNothing: the row has no result.
  int32_t given = kChoose;
  int32_t unused = 0;
};
static_assert(sizeof(TokenRule) == 40, "rows of bytes that host and device read alike");

}  // namespace tessera
