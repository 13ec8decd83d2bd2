#pragma once

#include <cstdint>
#include <vector>

#include "model/build/layer_program.h"
#include "parallel/token_sharding.h"

namespace tessera {

/// Which tokens of a micro-batch a rank works on.
struct TokenShare {
  std::vector<int64_t> own;    ///< T_l
  std::vector<int64_t> group;  ///< T_g: of the tensor-parallel group, in its ranks' order
  bool is_whole = false;       ///< both are all tokens, in their order
};
TokenShare share_tokens(const BatchShape& shape, const StageGroups& groups);
TokenSharding token_sharding(const BatchShape& shape, const StageGroups& groups);

}  // namespace tessera
