#pragma once

#include <string>

#include "model/build/layer_builder.h"
#include "model/dispatch/dispatchers.h"
#include "ops/expert_clones/clone_plan.h"

/// Clones of hot experts on ranks with few tokens (ECHO: Megatron-Core MoE, section 4.3.7). The
/// slots for them are experts of a second kind, P · S of them, to which the same tokens are
/// dispatched: each assignment goes either to its expert at home or to a clone, so that neither
/// dispatchers nor products know of clones.
namespace tessera {

/// Whether the layer's experts may be cloned. Throws UserError where they may and something else
/// that is configured does not go with it.
bool clones_experts(const LayerBuilder& builder);

/// Where this rank's assignments go.
struct ClonedRouting {
  CloneSlots slots;
  ValueId experts = -1;       ///< I64 [P · S]: the expert in each slot
  ValueId home_idx_TK = -1;   ///< I32 [T, K]: expert, or -1
  ValueId clone_idx_TK = -1;  ///< I32 [T, K]: slot, or -1
};

/// Counts the tokens of all ranks of EP by expert, and plans clones by them.
ClonedRouting plan_clones(LayerBuilder& builder, ValueId expert_idx_TK);

/// How tokens reach the clones, where `home` is how they reach the experts.
DispatchSpec clone_dispatch(const DispatchSpec& home, const ClonedRouting& routing,
                            int64_t num_tokens);

/// The weights of the clones in this rank's slots: A [S · B, H] of those of its experts [E/P · B,
/// H].
ValueId clone_weight(LayerBuilder& builder, const ClonedRouting& routing, ValueId weight,
                     std::string name);

}  // namespace tessera
