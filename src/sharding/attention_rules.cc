#include <algorithm>

#include "ops/attention/attention_operands.h"
#include "ops/attention_sink/attention_sink.h"
#include "ops/index_topk/index_topk.h"
#include "ops/max_logits/max_logits.h"
#include "ops/ring_attention/ring_attention.h"
#include "ops/sparse_attention/sparse_attention.h"
#include "sharding/rule_table.h"

namespace tessera::shard_rules {
namespace {

using Kind = ShardState::Kind;

/// Whether ranks may have different tokens: different sequences, or the blocks of a ring.
bool may_cut_tokens(const AxisCall& call) {
  if (call.axis == RankAxis::kDp) return true;
  const auto* ring = dynamic_cast<const RingAttentionOperator*>(&call.op);
  if (ring == nullptr) return false;
  const std::vector<RankAxis>* axes = call.axes.find(ring->comm());
  return axes != nullptr && std::ranges::find(*axes, call.axis) != axes->end();
}

/// Whether `k` and `v` belong to queries that are cut as `q` is.
void check_keys(const AxisCall& call, const ShardState& q, const ShardState& k,
                const ShardState& v) {
  if (k != v) fault("keys and values are not spread alike");
  if (q == k) return;
  const bool shares_heads =
      q == ShardState::sharded(1) && k.is(Kind::kReplicated) && call.axis == RankAxis::kTpCopies;
  if (!shares_heads) fault("queries do not have the keys that they attend to");
}

void check_queries(const AxisCall& call, const ShardState& q) {
  if (q.is(Kind::kPartial)) fault("queries are partial sums");
  if (q == ShardState::sharded(0) && !may_cut_tokens(call))
    fault("queries do not see the tokens that other ranks have of their sequence");
}

/// What is chosen is for the tokens that the queries are of, and the same for all heads.
void check_choice(const ShardState& q, const ShardState& chosen) {
  const bool by_token = q == ShardState::sharded(0);
  if (chosen != (by_token ? q : ShardState::replicated()))
    fault("what is chosen is not for the tokens of the queries");
}

/// The sinks that a rank reads of them all are those of its own heads.
bool takes_own_sinks(const AxisCall& call, const AttentionSinkSpec& spec, const ShardState& o,
                     const ShardState& sinks) {
  return spec.num_sinks > spec.num_heads && o == ShardState::sharded(1) &&
         sinks.is(Kind::kReplicated) && factoring_of(call.axis) == Factoring::kDense;
}

}  // namespace

ShardStatesOf attention(const AxisCall& call) {
  if (factoring_of(call.axis) == Factoring::kExperts) return std::nullopt;
  const ShardState& q = call.inputs[attention::kQ];
  check_queries(call, q);
  check_keys(call, q, call.inputs[attention::kK], call.inputs[attention::kV]);
  const ShardState& bounds = call.inputs[attention::kForwardCuSeqlens];
  if (bounds.is_cut() || bounds.is(Kind::kPartial)) fault("the sequences' bounds are not whole");
  // The statistics are [heads, tokens].
  const ShardState statistics = q.is_cut() ? ShardState::sharded(1 - q.dim) : q;
  return {{q, statistics}};
}

ShardStatesOf attention_backward(const AxisCall& call) {
  if (factoring_of(call.axis) == Factoring::kExperts) return std::nullopt;
  const ShardState& q = call.inputs[attention::kQ];
  const ShardState& k = call.inputs[attention::kK];
  check_queries(call, q);
  check_keys(call, q, k, call.inputs[attention::kV]);
  const ShardState& grad = call.inputs[attention::kGradO];
  if (q.is(Kind::kReplicated) && grad.is(Kind::kPartial)) return {{grad, grad, grad}};
  if (grad != q) fault("the gradient is not spread as the queries are");
  // Each rank's queries have their part in the gradient of keys that several ranks share.
  const ShardState of_keys = k == q ? k : ShardState::partial();
  return {{q, of_keys, of_keys}};
}

/// Rows of keys are numbered as a rank has them, so that it chooses among whole sequences.
ShardStatesOf index_topk(const AxisCall& call) {
  return follow_sequences(call, IndexTopk::kCuSeqlens, "q:tH w:tN k:tD -> c:tK");
}

/// Entries are of whole windows, and rows of them numbered as a rank has them.
ShardStatesOf index_topk_entries(const AxisCall& call) {
  return follow_positions(call, "q:tH w:tN k:tD p:t -> c:tK");
}

ShardStatesOf compress_windows(const AxisCall& call) {
  return follow_positions(call, "k:tD g:tD b:RD p:t -> e:tD=k r:t");
}

ShardStatesOf compress_windows_backward(const AxisCall& call) {
  return follow_positions(call, "k:tD g:tD b:RD p:t e:tD -> dk:tD=e dg:tD=e db:RD=e");
}

ShardStatesOf window_choice(const AxisCall& call) {
  return follow_positions(call, call.inputs.size() > 1 ? "p:t c:tK -> r:tW" : "p:t -> r:tW");
}

ShardStatesOf sparse_attention(const AxisCall& call) {
  using Op = SparseAttention;
  if (factoring_of(call.axis) == Factoring::kExperts) return std::nullopt;
  const ShardState& q = call.inputs[Op::kQ];
  check_queries(call, q);
  check_keys(call, q, call.inputs[Op::kK], call.inputs[Op::kV]);
  check_choice(q, call.inputs[Op::kChosen]);
  return {{q, q.is_cut() ? ShardState::sharded(1 - q.dim) : q}};
}

ShardStatesOf sparse_attention_backward(const AxisCall& call) {
  using Op = SparseAttentionBackward;
  if (factoring_of(call.axis) == Factoring::kDense)
    check_choice(call.inputs[Op::kQ], call.inputs[Op::kChosen]);
  return attention_backward(call);
}

/// Each rank has the largest of its own queries' logits: those of some heads, or of some tokens,
/// which is no part of the whole.
ShardStatesOf max_logits(const AxisCall& call) {
  using Op = MaxLogits;
  if (factoring_of(call.axis) == Factoring::kExperts) return std::nullopt;
  const ShardState& q = call.inputs[Op::kQ];
  const ShardState& k = call.inputs[Op::kK];
  if (q.is(Kind::kPartial)) fault("queries are partial sums");
  if (call.inputs[Op::kLse] != (q.is_cut() ? ShardState::sharded(1 - q.dim) : q))
    fault("the statistics are not spread as the queries are");
  if (q == ShardState::sharded(0)) {
    const bool sees_all = call.axis == RankAxis::kDp ? k == q : k.is(Kind::kReplicated);
    if (!sees_all) fault("queries do not have the keys that they attend to");
    return {{ShardState::varying()}};
  }
  check_keys(call, q, k, k);
  return {{q == ShardState::sharded(1) ? ShardState::sharded(0) : q}};
}

ShardStatesOf attention_sink(const AxisCall& call) {
  using Op = AttentionSink;
  std::vector<ShardState> inputs(call.inputs.begin(), call.inputs.end());
  const auto& op = dynamic_cast<const Op&>(call.op);
  if (takes_own_sinks(call, op.spec(), inputs[Op::kO], inputs[Op::kSinks]))
    inputs[Op::kSinks] = ShardState::sharded(0);
  return follow(call, "o:tn l:nt s:n -> y:tn=o", inputs);
}

ShardStatesOf attention_sink_backward(const AxisCall& call) {
  using Op = AttentionSinkBackward;
  std::vector<ShardState> inputs(call.inputs.begin(), call.inputs.end());
  const auto& op = dynamic_cast<const Op&>(call.op);
  const bool own = takes_own_sinks(call, op.spec(), inputs[Op::kO], inputs[Op::kSinks]);
  if (own) inputs[Op::kSinks] = ShardState::sharded(0);
  ShardStatesOf grads = follow(call, "g:tn o:tn l:nt s:n -> do:tn=g dl:nt=g ds:n=g", inputs);
  // A rank adds nothing to the sinks of the others' heads.
  if (own && grads) (*grads)[Op::kGradSinks] = ShardState::partial();
  return grads;
}

}  // namespace tessera::shard_rules
