#include "ops/gated_delta/gated_delta.h"
#include "ops/short_conv/short_conv.h"
#include "ops/ssd_scan/ssd_scan.h"
#include "sharding/rule_table.h"

namespace tessera::shard_rules {
ShardStatesOf follow_sequences(const AxisCall& call, int bounds, std::string_view rule) {
  if (factoring_of(call.axis) == Factoring::kExperts) return std::nullopt;
  if (call.axis != RankAxis::kDp && call.inputs[0] == ShardState::sharded(0))
    fault("tokens do not see those that other ranks have of their sequence");
  if (call.inputs[bounds].is_cut() || call.inputs[bounds].is(ShardState::Kind::kPartial))
    fault("the sequences' bounds are not whole");
  std::vector<ShardState> inputs(call.inputs.begin(), call.inputs.end());
  inputs.erase(inputs.begin() + bounds);
  return follow(call, rule, inputs);
}

ShardStatesOf follow_positions(const AxisCall& call, std::string_view rule) {
  if (factoring_of(call.axis) == Factoring::kExperts) return std::nullopt;
  if (call.axis != RankAxis::kDp && call.inputs[0] == ShardState::sharded(0))
    fault("tokens do not see those that other ranks have of their sequence");
  return follow(call, rule);
}

namespace {

/// Whether a rank reads, of weights that all ranks of the axis have, those of its own heads or
/// channels.
bool takes_own_part(const AxisCall& call, bool has_parts, int weight) {
  return has_parts && call.inputs[0] == ShardState::sharded(1) &&
         call.inputs[weight].is(ShardState::Kind::kReplicated) &&
         factoring_of(call.axis) == Factoring::kDense;
}

/// Of weights of which a rank takes its own part: along which axis that is, and what follows.
class OwnParts {
 public:
  OwnParts(const AxisCall& call, bool has_parts, std::initializer_list<int> weights)
      : takes_(takes_own_part(call, has_parts, *weights.begin())),
        states_(call.inputs.begin(), call.inputs.end()) {
    for (const int weight : weights)
      if (takes_) states_[weight] = ShardState::sharded(0);
  }
  /// The call as the rank reads the weights.
  AxisCall of(const AxisCall& call) const {
    return {call.op, call.types, call.axis, states_, call.axes};
  }
  /// A rank adds nothing to the gradients of the others' parts, outputs `first` and on.
  ShardStatesOf without_others(ShardStatesOf grads, size_t first) const {
    for (size_t i = first; takes_ && grads && i < grads->size(); ++i)
      (*grads)[i] = ShardState::partial();
    return grads;
  }

 private:
  bool takes_;
  std::vector<ShardState> states_;
};

/// Of a convolution of either pass.
template <typename Op>
OwnParts own_channels(const AxisCall& call) {
  const auto& op = dynamic_cast<const Op&>(call.op);
  const bool has_parts = op.spec().all_channels > 0;
  return op.biased() ? OwnParts(call, has_parts, {Op::kWeight, Op::kBias})
                     : OwnParts(call, has_parts, {Op::kWeight});
}

/// Of a scan of either pass.
template <typename Op>
OwnParts own_heads(const AxisCall& call) {
  const bool has_parts = dynamic_cast<const Op&>(call.op).spec().all_heads > 0;
  return {call, has_parts, {Op::kALog, Op::kD, Op::kDtBias}};
}

}  // namespace

ShardStatesOf short_conv(const AxisCall& call) {
  using Op = ShortConv;
  const bool biased = dynamic_cast<const Op&>(call.op).biased();
  const OwnParts own = own_channels<Op>(call);
  return follow_sequences(own.of(call), Op::kCuSeqlens,
                          biased ? "x:tn w:nK b:n -> y:tn" : "x:tn w:nK -> y:tn");
}

ShardStatesOf short_conv_backward(const AxisCall& call) {
  using Op = ShortConvBackward;
  const bool biased = dynamic_cast<const Op&>(call.op).biased();
  const OwnParts own = own_channels<Op>(call);
  return own.without_others(follow_sequences(own.of(call), Op::kCuSeqlens,
                                             biased ? "x:tn w:nK g:tn b:n -> dx:tn=g dw:nK=g db:n=g"
                                                    : "x:tn w:nK g:tn -> dx:tn=g dw:nK=g"),
                            Op::kGradWeight);
}

/// Value heads go with the key heads that they read. Also Kimi Delta Attention's, whose operands
/// stand in the same places.
ShardStatesOf gated_delta(const AxisCall& call) {
  const bool forward = call.inputs.size() == 6;
  return follow_sequences(
      call, GatedDelta::kCuSeqlens,
      forward ? "q:tn k:tn v:tn g:tn b:tn -> o:tn"
              : "q:tn k:tn v:tn g:tn b:tn o:tn -> dq:tn=o dk:tn=o dv:tn=o dg:tn=o db:tn=o");
}

/// Groups go with their heads.
ShardStatesOf ssd_scan(const AxisCall& call) {
  using Op = SsdScan;
  const OwnParts own = own_heads<Op>(call);
  return follow_sequences(own.of(call), Op::kCuSeqlens, "x:tn d:tn b:tn c:tn l:n s:n u:n -> y:tn");
}

ShardStatesOf ssd_scan_backward(const AxisCall& call) {
  using Op = SsdScanBackward;
  const OwnParts own = own_heads<Op>(call);
  return own.without_others(
      follow_sequences(own.of(call), Op::kCuSeqlens,
                       "x:tn d:tn b:tn c:tn l:n s:n u:n y:tn -> dx:tn=y dd:tn=y db:tn=y dc:tn=y "
                       "dl:n=y ds:n=y du:n=y"),
      Op::kGradALog);
}

/// The order of tokens is that of all that share a micro-batch.
ShardStatesOf deal_tokens(const AxisCall& call) {
  return follow_positions(call, "x:tn -> y:tn=x");
}

}  // namespace tessera::shard_rules
