#pragma once

#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "ops/operator.h"
#include "sharding/axis_rule.h"
#include "sharding/rank_axes.h"

namespace tessera {

/// One operator along one axis of more than one rank.
struct AxisCall {
  const Operator& op;
  std::span<const ValueType> types;  ///< of the inputs
  RankAxis axis;
  std::span<const ShardState> inputs;
  const RankAxes& axes;
};

using ShardStatesOf = std::optional<std::vector<ShardState>>;

/// What the operator makes along the axis of what it reads: a state for each output. nullopt where
/// nothing can be said along this axis, as of tokens that are gathered over TP along EP. Throws
/// ShardFault where the operator must not read this, and InternalError for an operator without a
/// rule.
ShardStatesOf infer_axis(const AxisCall& call);

/// Whether operators of this name have a rule.
bool has_shard_rule(std::string_view name);

}  // namespace tessera
