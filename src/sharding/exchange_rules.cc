#include <algorithm>

#include "ops/collective/collective.h"
#include "ops/collective/head_exchange.h"
#include "sharding/rule_table.h"

namespace tessera::shard_rules {
namespace {

using Kind = ShardState::Kind;

/// What an exchange is along one axis.
enum class Reach : uint8_t {
  kAlong,      ///< the group's ranks differ along it
  kElsewhere,  ///< they do not: each rank's result is of what it had
  kUnknown,    ///< the group is one of the other factoring
};

Reach reach(const AxisCall& call) {
  const auto& exchange = dynamic_cast<const CollectiveOperator&>(call.op);
  const std::vector<RankAxis>* axes = call.axes.find(exchange.comm());
  if (axes == nullptr)
    throw ShardFault(fmt::format("group '{}' is none of the stage's", exchange.comm().name()));
  if (std::ranges::find(*axes, call.axis) != axes->end()) return Reach::kAlong;
  if (axes->empty() || factoring_of(axes->front()) == factoring_of(call.axis))
    return Reach::kElsewhere;
  return Reach::kUnknown;
}

/// The result where the exchange is along the axis, given what each rank has.
template <typename Along>
ShardStatesOf exchange(const AxisCall& call, Along along) {
  const ShardState x = call.inputs[0];
  switch (reach(call)) {
    case Reach::kUnknown:
      return std::nullopt;
    case Reach::kElsewhere:
      return {{x}};
    case Reach::kAlong:
      break;
  }
  for (const ShardState& other : call.inputs.subspan(1)) {
    if (other.is(Kind::kPartial)) fault("the numbers of rows are partial sums");
  }
  return {{along(x)}};
}

}  // namespace

ShardStatesOf all_gather(const AxisCall& call) {
  return exchange(call, [](const ShardState& x) {
    if (x.is(Kind::kReplicated)) fault("copies of what all ranks have are gathered");
    if (x.is(Kind::kPartial)) fault("partial sums are gathered that are to be added");
    if (x.is_cut() && x != ShardState::sharded(0)) fault("other parts than rows are gathered");
    return ShardState::replicated();
  });
}

ShardStatesOf reduce_scatter(const AxisCall& call) {
  return exchange(call, [](const ShardState& x) {
    if (!x.is(Kind::kPartial)) fault("what is summed over the ranks is no partial sum");
    return ShardState::sharded(0);
  });
}

ShardStatesOf all_reduce(const AxisCall& call) {
  return exchange(call, [](const ShardState& x) {
    if (!x.is(Kind::kPartial)) fault("what is summed over the ranks is no partial sum");
    return ShardState::replicated();
  });
}

/// Equal parts for all ranks. Of the dense parts these are each rank's statistics for all tokens,
/// which become all statistics for its own; among the experts rows, which go to their experts.
ShardStatesOf all_to_all(const AxisCall& call) {
  return exchange(call, [&](const ShardState& x) {
    const bool experts = is_ep(call.axis);
    if (!experts && call.axis != RankAxis::kTpCopies && call.axis != RankAxis::kTpParts)
      fault("parts for the ranks of TP or EP are exchanged along another axis");
    if (x == ShardState::sharded(0))
      return experts ? ShardState::by_expert(0) : ShardState::varying();
    if (x.is(Kind::kVarying)) return experts ? ShardState::by_expert(0) : ShardState::sharded(0);
    if (experts && x == ShardState::by_expert(0)) return ShardState::sharded(0);
    fault("what is exchanged is not parts for the ranks");
  });
}

ShardStatesOf all_to_all_v(const AxisCall& call) {
  return exchange(call, [](const ShardState& x) {
    if (x == ShardState::sharded(0)) return ShardState::by_expert(0);
    if (x == ShardState::by_expert(0)) return ShardState::sharded(0);
    fault("what is exchanged is not rows of the ranks' tokens or experts");
  });
}

/// Weights go from where their experts are to others, which have other clones in every copy of the
/// experts.
ShardStatesOf clone_weights(const AxisCall& call) {
  if (call.axis == RankAxis::kEdp) {
    if (!call.inputs[0].is(Kind::kReplicated)) fault("weights are not the same in all copies");
    return {{ShardState::varying()}};
  }
  return exchange(call, [](const ShardState& x) {
    if (x != ShardState::by_expert(0)) fault("what is cloned is not the ranks' own experts");
    return x;
  });
}

ShardStatesOf return_clones(const AxisCall& call) {
  return exchange(call, [](const ShardState& x) {
    if (x != ShardState::by_expert(0)) fault("what is returned is not the ranks' own clones");
    return x;
  });
}

ShardStatesOf gather_heads(const AxisCall& call) {
  return exchange(call, [](const ShardState& x) {
    if (x != ShardState::sharded(0)) fault("tokens are gathered of which no rank has a part");
    return ShardState::sharded(1);
  });
}

ShardStatesOf scatter_heads(const AxisCall& call) {
  return exchange(call, [](const ShardState& x) {
    if (x != ShardState::sharded(1)) fault("heads are gathered of which no rank has a part");
    return ShardState::sharded(0);
  });
}

}  // namespace tessera::shard_rules
