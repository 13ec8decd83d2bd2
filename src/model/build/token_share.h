#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/build/model_program.h"
#include "parallel/token_sharding.h"

namespace tessera {

/// Which tokens of a micro-batch a rank works on.
struct TokenShare {
  std::vector<int64_t> own;    ///< T_l
  std::vector<int64_t> group;  ///< T_g: of the tensor-parallel group, in its ranks' order
  bool is_whole = false;       ///< both are all tokens, in their order
};

/// A rank's part of a micro-batch of dynamic context parallelism.
struct ContextShare {
  int64_t degree = 1;  ///< ranks of DP · CP that share it
  int64_t place = 0;   ///< the rank's among them
  TokenShare tokens;
  std::vector<int32_t> segments;  ///< of own tokens: the sequence, below 0 for those that fill it
};

TokenShare share_tokens(const BatchShape& shape, const StageGroups& groups);
TokenSharding token_sharding(const BatchShape& shape, const StageGroups& groups);
/// Of a micro-batch with these bounds and tokens' segments; `groups` are those of its degree.
ContextShare share_documents(std::span<const int32_t> cu_seqlens, std::span<const int32_t> segments,
                             const StageGroups& groups);

}  // namespace tessera
