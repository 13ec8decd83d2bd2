#pragma once

#include <cstdint>
#include <vector>

#include "core/zigzag.h"

namespace tessera {

/// Which ranks hold which tokens of a micro-batch of B rows of S tokens. CP = R · U: a ring of R
/// ranks shares the tokens as core/zigzag.h says; what one place of the ring holds is cut, in
/// order, into U equal parts for the ranks that exchange heads by all-to-all, and each part into TP
/// equal parts (sequence parallelism). Tokens are numbered through all rows.
struct TokenSharding {
  int64_t num_rows = 1;    ///< B
  int64_t row_length = 1;  ///< S
  int64_t ring = 1;        ///< R
  int64_t all_to_all = 1;  ///< U
  int64_t tp = 1;

  Zigzag zigzag() const { return {num_rows, row_length, ring}; }
  int64_t tokens_per_ring_rank() const { return zigzag().tokens_per_rank(); }
  int64_t tokens_per_rank() const { return tokens_per_ring_rank() / (all_to_all * tp); }
};

/// Throws UserError, with the nearest valid choices, unless each of the ranks gets equally many
/// tokens: S must be a multiple of 2R (where R > 1) and B·S of R·U·TP.
void check_token_sharding(const TokenSharding& sharding);

/// The tokens of one place of the ring, in order. REQUIRES check_token_sharding.
std::vector<int64_t> ring_tokens(const TokenSharding& sharding, int64_t ring_coordinate);

/// The tokens of one rank, in order. REQUIRES check_token_sharding.
std::vector<int64_t> local_tokens(const TokenSharding& sharding, int64_t ring_coordinate,
                                  int64_t all_to_all_coordinate, int64_t tp_coordinate);

}  // namespace tessera
