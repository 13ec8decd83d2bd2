#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace tessera {

/// Which token a row of queries is of, and in which row a token's key stands, where a ring shares
/// the tokens as core/zigzag.h says and keys are gathered rank by rank. Without a ring rows are
/// tokens.
struct TokenRows {
  int64_t ring = 1;
  int64_t rank = 0;
  int64_t num_rows = 1;  ///< of the micro-batch
  int64_t row_length = 1;
  int64_t chunk = 1;  ///< tokens that stand together

  TESSERA_HOST_DEVICE_INLINE int64_t token_of_query(int64_t row) const {
    if (ring == 1) return row;
    const int64_t run = row / chunk;
    const int64_t part = run % 2 == 0 ? rank : 2 * ring - 1 - rank;
    return run / 2 * row_length + part * chunk + row % chunk;
  }
  TESSERA_HOST_DEVICE_INLINE int64_t row_of_key(int64_t token) const {
    if (ring == 1) return token;
    const int64_t part = token % row_length / chunk;
    const int64_t owner = part < ring ? part : 2 * ring - 1 - part;
    const int64_t run = token / row_length * 2 + (part < ring ? 0 : 1);
    return (owner * 2 * num_rows + run) * chunk + token % chunk;
  }
};

}  // namespace tessera
