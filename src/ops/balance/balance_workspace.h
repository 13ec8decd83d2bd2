#pragma once

#include "ops/balance/balance.h"
#include "ops/workspace.h"

namespace tessera {

/// Where the parts of the scratch memory of BalanceStatistics start, in bytes.
struct StatisticsWorkspace {
  int64_t shares = 0;  ///< f32 [T, E] every token's scores, made to sum to 1
  int64_t sums = 0;    ///< f64 [G, E]
  int64_t num_bytes = 0;

  StatisticsWorkspace(int64_t num_tokens, const BalanceStatisticsSpec& spec) {
    WorkspaceLayout layout;
    shares = layout.add<float>(num_tokens * spec.num_experts);
    sums = layout.add<double>(spec.num_segments * spec.num_experts);
    num_bytes = layout.num_bytes();
  }
};

}  // namespace tessera
