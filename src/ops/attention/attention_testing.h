#pragma once

#include <vector>

#include "ops/attention/attention.h"
#include "ops/testing/op_test.h"

namespace tessera::testing {

/// Values of the queries' size where none is given.
inline AttentionSpec heads(int64_t num_heads, int64_t num_kv_heads, int64_t head_size,
                           int64_t head_size_v = 0, int64_t window = 0) {
  return {.num_heads = num_heads,
          .num_kv_heads = num_kv_heads,
          .head_size = head_size,
          .head_size_v = head_size_v == 0 ? head_size : head_size_v,
          .window = window};
}

/// The ends of sequences of these lengths, as attention takes them.
inline OwnedTensor cumulative(const std::vector<int64_t>& lengths) {
  std::vector<int32_t> ends = {0};
  for (const int64_t length : lengths) ends.push_back(ends.back() + static_cast<int32_t>(length));
  return tensor_of_i32({std::ssize(ends)}, ends);
}

}  // namespace tessera::testing
