#pragma once

#include "ops/expert_clones/clone_plan.h"
#include "ops/workspace.h"

namespace tessera {

/// Scratch memory of ClonePlan's kernels, in bytes from its begin; all I64.
struct ClonePlanWorkspace {
  explicit ClonePlanWorkspace(const CloneSlots& slots) {
    WorkspaceLayout layout;
    rest = layout.add<int64_t>(slots.num_experts);
    loads = layout.add<int64_t>(slots.num_ranks);
    filled = layout.add<int64_t>(slots.num_ranks);
    quotas = layout.add<int64_t>(slots.num_slots());
    num_bytes = layout.num_bytes();
  }

  int64_t rest = 0;    ///< [E]: an expert's tokens that stay at home
  int64_t loads = 0;   ///< [P]: a rank's tokens
  int64_t filled = 0;  ///< [P]: slots in use
  int64_t quotas = 0;  ///< [P · S]: tokens of a slot
  int64_t num_bytes = 0;
};

}  // namespace tessera
