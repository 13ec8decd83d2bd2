#include <algorithm>

#include "ops/block_sparse/block_sparse_product.h"
#include "ops/dispatch_plan/dispatch_plan.h"
#include "ops/expert_activation/activated_product.h"
#include "ops/expert_bias/expert_bias.h"
#include "ops/grouped_matmul/grouped_matmul.h"
#include "ops/quantize_tokens/quantize_tokens.h"
#include "ops/route_map/capacity_limit.h"
#include "ops/route_map/route_map.h"
#include "ops/sinkhorn/sinkhorn.h"
#include "sharding/rule_table.h"

namespace tessera::shard_rules {
namespace {

using Kind = ShardState::Kind;

bool agrees(const ShardState& map, const ShardState& x) {
  return map == x || map.is(Kind::kVarying);
}

/// Rows of `x` in the order of maps.
ShardState permuted(const ShardState& x, const ShardState& source, const ShardState& row_of) {
  if (x.is_cut() && x.dim == 0) {
    if (!agrees(source, x) || !agrees(row_of, x)) fault("the maps are of other ranks' rows");
    return x;
  }
  if (x.is(Kind::kVarying)) return x;
  if (source.is(Kind::kReplicated) && row_of.is(Kind::kReplicated)) return x;
  // Each rank takes the rows of its own experts.
  if (x.is(Kind::kReplicated) && source == ShardState::by_expert(0)) return source;
  fault("rows are taken by maps that are not the same on all ranks");
}

/// What rows add up to by token.
ShardState added_up(const ShardState& rows, const ShardState& source, const ShardState& row_of) {
  if (rows.is(Kind::kVarying)) return rows;
  if (rows == ShardState::by_expert(0) && row_of.is(Kind::kVarying) && agrees(source, rows))
    return ShardState::partial();
  if (rows.is_cut() && rows.dim == 0) {
    if (!agrees(source, rows) || !agrees(row_of, rows)) fault("the maps are of other ranks' rows");
    return rows;
  }
  if (source.is(Kind::kReplicated) && row_of.is(Kind::kReplicated)) return rows;
  fault("rows are added up by maps that are not the same on all ranks");
}

ShardState with_addend(const AxisCall& call, size_t addend, const ShardState& sum) {
  if (call.inputs.size() > addend && call.inputs[addend] != sum)
    fault("what is added is not spread as the sum is");
  return sum;
}

/// The product's own inputs, rows that it gathers being permuted first.
std::vector<ShardState> gathered(const AxisCall& call, int rows, int source, bool gathers) {
  std::vector<ShardState> inputs(call.inputs.begin(), call.inputs.begin() + source);
  if (gathers) inputs[rows] = permuted(inputs[rows], call.inputs[source], call.inputs[source + 1]);
  return inputs;
}

std::string_view product_rule(GroupedSide side) {
  return side == GroupedSide::kOut ? "a:r^h w:f^h o:n^ -> y:r^f=aw"
                                   : "a:r^f w:f^h o:n^ -> y:r^h=aw";
}

ShardState product(const AxisCall& call, const GroupedMatmul& op) {
  const auto inputs = gathered(call, GroupedMatmul::kA, GroupedMatmul::kSource, op.gather());
  return (*follow(call, product_rule(op.side()), inputs))[0];
}

std::string_view activation_rule(bool apply_prob) {
  return apply_prob ? "x:r^f p:r^ o:n^ -> y:r^f" : "x:r^f o:n^ -> y:r^f";
}

std::string activation_backward_rule(bool apply_prob, bool gives_act) {
  return fmt::format(
      "{}{}",
      apply_prob ? "g:r^f x:r^f p:r^ o:n^ -> dx:r^f=g dp:r^=g" : "g:r^f x:r^f o:n^ -> dx:r^f=g",
      gives_act ? " act:r^f" : "");
}

/// The first result is given in FP8 too.
ShardStatesOf with_fp8(ShardStatesOf states, bool gives_fp8) {
  if (states && gives_fp8) states->push_back(states->front());
  return states;
}

/// `first`, and behind it the rest of what the fused operator reads.
std::vector<ShardState> followed_by(const ShardState& first, std::span<const ShardState> others) {
  std::vector<ShardState> inputs = {first};
  inputs.insert(inputs.end(), others.begin(), others.end());
  return inputs;
}

/// Whether ranks of ETP have some of the columns of all biases each.
bool adds_own_columns(const AxisCall& call, const ExpertBias& op) {
  return call.axis == RankAxis::kEtp && !op.is_sparse() &&
         op.sizes().largest() < call.types[0].shape[1];
}

/// Whether the ranks of a plan differ along the axis of experts.
bool plans_along(PlanReach reach, RankAxis axis) {
  if (reach == PlanReach::kAll) return true;
  return axis == RankAxis::kEpNodes ? reach == PlanReach::kNodes : reach == PlanReach::kWithin;
}

}  // namespace

/// A layout of some experts' rows takes, of tokens that all ranks of EP have, those of their own;
/// of tokens that came because of these experts, their choices of them.
ShardStatesOf route_map(const AxisCall& call) {
  const RouteMapSpec& spec = dynamic_cast<const RouteMap&>(call.op).spec();
  const bool selects = spec.num_local() < spec.num_experts;
  if (selects && is_ep(call.axis) && call.inputs[0] != ShardState::by_expert(0)) {
    for (const ShardState& state : call.inputs) {
      if (!state.is(Kind::kReplicated)) fault("experts are looked for among some ranks' tokens");
    }
    const ShardState own = ShardState::by_expert(0);
    const ShardState varying = ShardState::varying();
    return {{varying, own, own, varying, varying, own}};
  }
  return follow(call, "i:t^k p:t^k -> m:t^k s:t^ o:n^ x: d: c:n^");
}

/// Of the gathered tokens, each rank keeps its own.
ShardStatesOf capacity_limit(const AxisCall& call) {
  const CapacityLimitSpec& spec = dynamic_cast<const CapacityLimit&>(call.op).spec();
  const bool gathered_tokens = spec.tokens.count < call.types[0].shape[0];
  if (!gathered_tokens) return follow(call, "i:tk p:tk q:t -> k:tk d:");
  if (factoring_of(call.axis) == Factoring::kExperts) return std::nullopt;
  if (call.axis == RankAxis::kDp) return follow(call, "i:tk p:tk q:* -> k:tk d:");
  for (const ShardState& state : call.inputs) {
    if (!state.is(Kind::kReplicated)) fault("a capacity is over tokens that not all ranks have");
  }
  return {{ShardState::sharded(0), ShardState::varying()}};
}

/// Of the gathered tokens, each rank chooses for its own.
ShardStatesOf sinkhorn(const AxisCall& call) {
  const SinkhornSpec& spec = dynamic_cast<const Sinkhorn&>(call.op).spec();
  const bool gathered_tokens = spec.tokens.count < call.types[0].shape[0];
  if (factoring_of(call.axis) == Factoring::kExperts) return std::nullopt;
  if (call.axis == RankAxis::kDp) return follow(call, "l:tE n!: -> i:tk");
  for (const ShardState& state : call.inputs) {
    if (!state.is(Kind::kReplicated)) fault("loads are evened out over some ranks' tokens");
  }
  return {{gathered_tokens ? ShardState::sharded(0) : ShardState::replicated()}};
}

ShardStatesOf dispatch_plan(const AxisCall& call) {
  const ShardState varying = ShardState::varying();
  const ShardState& counts = call.inputs[0];
  if (call.axis == RankAxis::kEdp) {
    if (!counts.is(Kind::kVarying)) fault("counts are not those of the ranks of one copy");
    return {{varying, varying, varying, varying, varying, ShardState::sharded(0)}};
  }
  if (factoring_of(call.axis) == Factoring::kDense) return std::nullopt;
  if (!plans_along(dynamic_cast<const DispatchPlan&>(call.op).spec().reach, call.axis)) {
    if (!counts.is(Kind::kVarying) && counts != ShardState::by_expert(0))
      fault("counts are of ranks that the plan is not for");
    return {{varying, varying, varying, varying, varying, varying}};
  }
  if (!counts.is(Kind::kReplicated)) fault("counts are not those of all ranks of the experts");
  if (is_ep(call.axis))
    return {{varying, varying, varying, varying, varying, ShardState::by_expert(0)}};
  const ShardState same = ShardState::replicated();
  return {{varying, varying, varying, same, same, same}};
}

/// All ranks of EP find the same clones, those of each copy of the experts others.
ShardStatesOf clone_plan(const AxisCall& call) {
  const ShardState varying = ShardState::varying();
  const ShardState& counts = call.inputs[0];
  if (factoring_of(call.axis) == Factoring::kDense) return std::nullopt;
  if (!is_ep(call.axis)) {
    if (!counts.is(Kind::kVarying)) fault("counts are not those of the ranks of one copy");
    return {{varying, varying, varying}};
  }
  if (!counts.is(Kind::kReplicated)) fault("counts are not those of all ranks of the experts");
  return {{ShardState::replicated(), varying, varying}};
}

/// What came back stands as what the ranks' own tokens gave.
ShardStatesOf add_clones(const AxisCall& call) {
  if (factoring_of(call.axis) == Factoring::kDense) return std::nullopt;
  return {{call.inputs[0]}};
}

ShardStatesOf permute(const AxisCall& call) {
  return {{permuted(call.inputs[0], call.inputs[1], call.inputs[2])}};
}

ShardStatesOf permute_choices(const AxisCall& call) {
  return {{permuted(call.inputs[0], call.inputs[1], call.inputs[1])}};
}

ShardStatesOf unpermute(const AxisCall& call) {
  const ShardState sum = added_up(call.inputs[0], call.inputs[2], call.inputs[1]);
  return {{with_addend(call, 3, sum)}};
}

ShardStatesOf unpermute_weighted(const AxisCall& call) {
  const ShardState& probs = call.inputs[1];
  const ShardState sum = added_up(call.inputs[0], call.inputs[3], call.inputs[2]);
  const ShardState weights = sum.is(Kind::kPartial) ? ShardState::replicated() : sum;
  if (probs != weights) fault("probabilities are not those of the tokens");
  return {{with_addend(call, 4, sum)}};
}

ShardStatesOf unpermute_weighted_backward(const AxisCall& call) {
  const ShardState& grad = call.inputs[0];
  const ShardState& rows = call.inputs[1];
  const ShardState& probs = call.inputs[2];
  const ShardState& source = call.inputs[3];
  if (probs != grad) fault("probabilities are not those of the gradient's tokens");
  if (grad.is_cut()) {
    if (rows != grad || !agrees(source, grad)) fault("the maps are of other ranks' rows");
    return {{grad, grad}};
  }
  if (!grad.is(Kind::kReplicated)) fault("the gradient is not that of whole tokens");
  if (rows == ShardState::by_expert(0) && source == rows) return {{rows, ShardState::partial()}};
  if (!source.is(Kind::kReplicated)) fault("the maps are not the same on all ranks");
  if (rows.is_cut()) fault("rows are not those of the gradient's tokens");
  return {{grad, rows.is(Kind::kPartial) ? rows : grad}};
}

ShardStatesOf grouped_matmul(const AxisCall& call) {
  return {{product(call, dynamic_cast<const GroupedMatmul&>(call.op))}};
}

ShardStatesOf grouped_matmul_wgrad(const AxisCall& call) {
  const auto& op = dynamic_cast<const GroupedMatmulWgrad&>(call.op);
  const auto inputs =
      gathered(call, GroupedMatmulWgrad::kWide, GroupedMatmulWgrad::kSource, op.gather());
  return follow(call, "n:r^f x:r^h o:n^ -> dw:f^h=nx", inputs);
}

/// Scales go along tokens, as these do: each rank's are of its own.
ShardStatesOf quantize_tokens(const AxisCall& call) {
  constexpr std::string_view kRule = "x:r^c o:n^ -> y:cr^ s:r^c";
  if (!dynamic_cast<const QuantizeTokens&>(call.op).gather()) return follow(call, kRule);
  return follow(call, kRule, gathered(call, QuantizeTokens::kX, QuantizeTokens::kSource, true));
}

/// Of a sum over the ranks of ETP each adds the biases of its own columns.
ShardStatesOf expert_bias(const AxisCall& call) {
  const auto& op = dynamic_cast<const ExpertBias&>(call.op);
  if (adds_own_columns(call, op)) {
    if (!call.inputs[ExpertBias::kX].is(Kind::kPartial) ||
        call.inputs[ExpertBias::kBias] != ShardState::sharded(0))
      fault("columns of biases are added to what is no sum over the ranks");
    return {{ShardState::partial()}};
  }
  return follow(call, op.apply_prob() ? "x:r^f b:f^ p:r^ o:n^ q:n^ -> y:r^f=x+bp"
                                      : "x:r^f b:f^ o:n^ q:n^ -> y:r^f=x+b");
}

ShardStatesOf expert_bias_backward(const AxisCall& call) {
  const auto& op = dynamic_cast<const ExpertBiasBackward&>(call.op);
  const bool probs = op.forward().apply_prob();
  if (adds_own_columns(call, op.forward())) {
    if (!call.inputs[ExpertBiasBackward::kGrad].is(Kind::kReplicated))
      fault("the gradient is not that of whole rows");
    if (probs) return {{ShardState::partial(), ShardState::sharded(0)}};
    return {{ShardState::sharded(0)}};
  }
  return follow(call, probs ? "g:r^f b:f^ p:r^ o:n^ q:n^ -> dp:r^=gb db:f^=gp"
                            : "g:r^f o:n^ q:n^ -> db:f^=g");
}

ShardStatesOf expert_activation(const AxisCall& call) {
  const auto& op = dynamic_cast<const ExpertActivation&>(call.op);
  return with_fp8(follow(call, activation_rule(op.apply_prob())), op.gives_fp8());
}

ShardStatesOf expert_activation_backward(const AxisCall& call) {
  const auto& op = dynamic_cast<const ExpertActivationBackward&>(call.op);
  const auto rule = activation_backward_rule(op.forward().apply_prob(), op.gives_act());
  return with_fp8(follow(call, rule), op.gives_fp8());
}

ShardStatesOf activated_product(const AxisCall& call) {
  const auto& op = dynamic_cast<const ActivatedProduct&>(call.op);
  const ShardState pre = product(call, op.product());
  const auto inputs = followed_by(pre, call.inputs.subspan(op.num_product_inputs()));
  ShardStatesOf act = follow(call, activation_rule(op.activation().apply_prob()), inputs);
  if (op.keeps_pre()) act->push_back(pre);
  return act;
}

ShardStatesOf activation_grad_product(const AxisCall& call) {
  const auto& op = dynamic_cast<const ActivationGradProduct&>(call.op);
  const auto grad = follow(call, product_rule(op.product().side()), call.inputs.first(3));
  return follow(call, activation_backward_rule(op.activation().apply_prob(), op.gives_act()),
                followed_by((*grad)[0], call.inputs.subspan(3)));
}

/// A sparse operand is told as rows by columns, whatever its memory.
ShardStatesOf block_sparse_product(const AxisCall& call) {
  const BlockSparseProductSpec& spec = dynamic_cast<const BlockSparseProduct&>(call.op).spec();
  std::string left;
  std::string right;
  std::string out;
  switch (spec.kind) {
    case ProductKind::kSdd:
      left = spec.transpose_left ? "hr^" : "r^h";
      right = spec.transpose_right ? "f^h" : "hf^";
      out = "r^f";
      break;
    case ProductKind::kDsd:
      left = "r^f";
      if (spec.transpose_left) {
        right = spec.transpose_right ? "hr^" : "r^h";
        out = "f^h";
      } else {
        right = spec.transpose_right ? "hf^" : "f^h";
        out = "r^h";
      }
      break;
    case ProductKind::kDds:
      right = "r^f";
      if (spec.transpose_right) {
        left = spec.transpose_left ? "f^h" : "hf^";
        out = "hr^";
      } else {
        left = spec.transpose_left ? "r^h" : "hr^";
        out = "hf^";
      }
      break;
  }
  return follow(call,
                fmt::format("a:{} b:{} t:n^ u:n^ v:n^ w:n^ x:n^ z:* -> y:{}=ab", left, right, out));
}

}  // namespace tessera::shard_rules
