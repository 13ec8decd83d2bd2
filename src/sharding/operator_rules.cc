#include "sharding/operator_rules.h"

#include <iterator>
#include <map>
#include <utility>
#include <variant>

#include "ops/block_linear/block_linear.h"
#include "ops/embedding/embedding.h"
#include "ops/linear/joined_linear.h"
#include "ops/linear/linear.h"
#include "ops/page_stash/page_stash.h"
#include "ops/quantize/quantize.h"
#include "ops/round_values/round_values.h"
#include "ops/router/router.h"
#include "ops/sigmoid_gate/sigmoid_gate.h"
#include "ops/sparse_mixer/sparse_mixer.h"
#include "ops/stream_weights/stream_weights.h"
#include "sharding/rule_table.h"

namespace tessera {
namespace shard_rules {

ShardStatesOf follow(const AxisCall& call, std::string_view rule,
                     std::span<const ShardState> inputs) {
  return AxisRule(rule).apply(call.axis, inputs);
}

ShardStatesOf follow(const AxisCall& call, std::string_view rule) {
  return follow(call, rule, call.inputs);
}

namespace {

using Kind = ShardState::Kind;

bool is_tp(RankAxis axis) {
  return axis == RankAxis::kTpCopies || axis == RankAxis::kTpParts;
}

ShardStatesOf add(const AxisCall& call) {
  switch (call.types[0].shape.rank()) {
    case 1:
      return follow(call, "a:t^ b:t^ -> y:t^=a+b");
    case 2:
      return follow(call, "a:t^h b:t^h -> y:t^h=a+b");
    default:
      return follow(call, "a:t^gh b:t^gh -> y:t^gh=a+b");
  }
}

ShardStatesOf linear(const AxisCall& call) {
  const bool addend = dynamic_cast<const Linear&>(call.op).extra() == Linear::Extra::kAddend;
  return follow(call, addend ? "x:th w:oh a:to -> y:to=xw+a" : "x:th w:oh b:o -> y:to=xw+b");
}

ShardStatesOf joined_linear(const AxisCall& call) {
  switch (dynamic_cast<const JoinedLinear&>(call.op).count()) {
    case 2:
      return follow(call, "x:th w:ah v:bh -> y:ta=xw z:tb=xv");
    case 3:
      return follow(call, "x:th w:ah v:bh u:ch -> y:ta=xw z:tb=xv r:tc=xu");
    default:
      return follow(call, "x:th w:ah v:bh u:ch s:dh -> y:ta=xw z:tb=xv r:tc=xu q:td=xs");
  }
}

ShardStatesOf joined_linear_dgrad(const AxisCall& call) {
  switch (dynamic_cast<const JoinedLinearDgrad&>(call.op).count()) {
    case 2:
      return follow(call, "g:ta w:ah k:tb v:bh x:th -> y:th=gw+kv+x");
    case 3:
      return follow(call, "g:ta w:ah k:tb v:bh l:tc u:ch x:th -> y:th=gw+kv+lu+x");
    default:
      return follow(call, "g:ta w:ah k:tb v:bh l:tc u:ch m:td s:dh x:th -> y:th=gw+kv+lu+ms+x");
  }
}

ShardStatesOf joined_linear_wgrad(const AxisCall& call) {
  switch (dynamic_cast<const JoinedLinearWgrad&>(call.op).count()) {
    case 2:
      return follow(call, "x:th g:ta k:tb -> w:ah=xg v:bh=xk");
    case 3:
      return follow(call, "x:th g:ta k:tb l:tc -> w:ah=xg v:bh=xk u:ch=xl");
    default:
      return follow(call, "x:th g:ta k:tb l:tc m:td -> w:ah=xg v:bh=xk u:ch=xl s:dh=xm");
  }
}

/// Blocks go with their rows of the weight; of one that all share, every rank needs all.
ShardStatesOf block_linear(const AxisCall& call) {
  const bool shared = dynamic_cast<const BlockLinear&>(call.op).shared();
  return follow(call, shared ? "x:tN w:RC -> y:tM=xw" : "x:tn w:nC -> y:tn=xw");
}

ShardStatesOf block_linear_dgrad(const AxisCall& call) {
  const bool shared = dynamic_cast<const BlockLinearDgrad&>(call.op).shared();
  return follow(call, shared ? "g:tM w:RC -> dx:tN=gw" : "g:tn w:nC -> dx:tn=gw");
}

ShardStatesOf block_linear_wgrad(const AxisCall& call) {
  const bool shared = dynamic_cast<const BlockLinearWgrad&>(call.op).shared();
  return follow(call, shared ? "x:tN g:tM -> dw:RC=xg" : "x:tn g:tn -> dw:nC=xg");
}

/// Of matrices that are turned, what belonged to an expert still does.
ShardStatesOf quantize(const AxisCall& call) {
  ShardState state = call.inputs[0];
  const bool is_turned = dynamic_cast<const Quantize&>(call.op).is_turned();
  if (is_turned && state.is(Kind::kSharded)) state = ShardState::sharded(1 - state.dim);
  return {{state}};
}

/// As of those.
ShardStatesOf turn_blocks(const AxisCall& call) {
  ShardState state = call.inputs[0];
  if (state.is(Kind::kSharded)) state = ShardState::sharded(1 - state.dim);
  return {{state}};
}

/// Delayed scales are the same everywhere; what a rank tallies is put together behind the step.
ShardStatesOf round_values(const AxisCall& call) {
  const auto& op = dynamic_cast<const RoundValues&>(call.op);
  if (!op.spec().cast.delayed) return follow(call, "x:r^c o:n^ -> y:r^c=x");
  if (!call.inputs.back().is(Kind::kReplicated))
    fault("delayed scales are not the same everywhere");
  ShardStatesOf states =
      follow(call, "x:r^c o:n^ -> y:r^c=x", call.inputs.first(call.inputs.size() - 1));
  if (states && op.spec().tallies) states->push_back(ShardState::replicated());
  return states;
}

/// A table of some rows of the vocabulary gives zeros for the tokens of the others.
ShardStatesOf embedding(const AxisCall& call) {
  const bool spread = dynamic_cast<const Embedding&>(call.op).spec().vocab_size > 0;
  return follow(call, spread && is_tp(call.axis) ? "i:t w:vH -> y:tH=w" : "i:t w:VH -> y:tH=w");
}

ShardStatesOf embedding_backward(const AxisCall& call) {
  const bool spread = dynamic_cast<const EmbeddingBackward&>(call.op).spec().vocab_size > 0;
  if (!spread || !is_tp(call.axis)) return follow(call, "i:t g:tH -> dw:VH=g");
  for (const ShardState& state : call.inputs) {
    if (!state.is(Kind::kReplicated)) fault("a part of the vocabulary needs the group's tokens");
  }
  return {{ShardState::sharded(0)}};
}

/// Rows are normed as wholes, or head by head.
bool norms_heads(const AxisCall& call) {
  return call.types[1].shape.last() < call.types[0].shape.last();
}

/// Whether each rank norms the one head that it has, which looks like a whole row: the weight of a
/// row's part would be a part itself.
bool norms_own_head(const AxisCall& call) {
  const ValueType& x = call.types[0];
  return x.shape.rank() == 2 && !norms_heads(call) && call.inputs[1].is(Kind::kReplicated) &&
         call.inputs[0] == ShardState::sharded(1);
}

/// A head's statistics have no dim of heads, so that of one head each are the ranks' own.
ShardStatesOf rmsnorm(const AxisCall& call) {
  if (norms_own_head(call)) {
    ShardStatesOf states = follow(call, "x:tn w:D -> y:tn");
    if (states) states->push_back(ShardState::varying());
    return states;
  }
  return follow(call, norms_heads(call) ? "x:tn w:D -> y:tn r:tn" : "x:tH w:H -> y:tH r:t");
}

ShardStatesOf rmsnorm_backward(const AxisCall& call) {
  if (norms_own_head(call)) {
    if (!call.inputs[2].is(Kind::kVarying)) fault("statistics are not those of the ranks' heads");
    std::vector<ShardState> rows(call.inputs.begin(), call.inputs.end());
    rows.erase(rows.begin() + 2);
    return follow(call, "x:tn w:D g:tn a:tn -> dx:tn=g+a dw:D=g", rows);
  }
  return follow(call, norms_heads(call) ? "x:tn w:D r:tn g:tn a:tn -> dx:tn=g+a dw:D=g"
                                        : "x:tH w:H r:t g:tH a:tH -> dx:tH=g+a dw:H=g");
}

/// Each of the ranks that hold the same heads counts them (build_spread_norm): what they have is a
/// summand each. Which ranks those are can be said of TP alone.
ShardStatesOf square_sums(const AxisCall& call) {
  if (factoring_of(call.axis) == Factoring::kExperts) return std::nullopt;
  if (call.axis == RankAxis::kTpCopies && call.inputs[0].is(Kind::kReplicated))
    return {{ShardState::partial()}};
  return follow(call, "x:tn -> s+:t");
}

ShardStatesOf square_sums_backward(const AxisCall& call) {
  if (factoring_of(call.axis) == Factoring::kExperts) return std::nullopt;
  const bool whole = call.inputs[0].is(Kind::kReplicated) && call.inputs[1].is(Kind::kReplicated);
  if (call.axis == RankAxis::kTpCopies && whole) return {{ShardState::partial()}};
  return follow(call, "x:tn g:t -> dx:tn=g");
}

ShardStatesOf rope(const AxisCall& call) {
  return follow(call,
                call.inputs.size() == 3 ? "x:tn z:tm p:t -> y:tn=x w:tm=z" : "x:tn p:t -> y:tn=x");
}

const GateSpec& gate_spec(const AxisCall& call) {
  const auto* forward = dynamic_cast<const SigmoidGate*>(&call.op);
  return forward != nullptr ? forward->spec()
                            : dynamic_cast<const SigmoidGateBackward&>(call.op).spec();
}

/// Whether rows are multiplied by factors.
bool weighs_rows(const AxisCall& call) {
  return gate_spec(call).function == GateFunction::kIdentity;
}

/// Whether each element or head has a gate, not each row.
bool gates_elements(const AxisCall& call) {
  return gate_spec(call).of_heads || call.types[1].shape == call.types[0].shape;
}

ShardStatesOf sigmoid_gate(const AxisCall& call) {
  if (weighs_rows(call)) return follow(call, "y:t^n l:t^ -> z:t^n=yl");
  return follow(call, gates_elements(call) ? "y:tn l:tn -> z:tn=y" : "y:tH l:tO -> z:tH=y");
}

ShardStatesOf sigmoid_gate_backward(const AxisCall& call) {
  if (weighs_rows(call)) return follow(call, "y:t^n l:t^ g:t^n -> dy:t^n=gl dl:t^=gy");
  return follow(call, gates_elements(call) ? "y:tn l:tn g:tn -> dy:tn=g dl:tn=g"
                                           : "y:tH l:tO g:tH -> dy:tH=g dl:tO=g");
}

ShardStatesOf router(const AxisCall& call) {
  const auto operands = dynamic_cast<const Router&>(call.op).input_set();
  std::string rule = "x:tH w:EH";
  if (operands.has(Router::kBias)) rule += " b:E";
  if (operands.has(Router::kExpertBias)) rule += " e:E";
  if (operands.has(Router::kCuSeqlens)) rule += " s:n";
  if (operands.has(Router::kReplayed)) rule += " r:tk";
  if (operands.has(Router::kSegments)) rule += " g:t";
  return follow(call, rule + " -> p:tk i:tk l:tE c~:E b: z~: m~:E");
}

ShardStatesOf router_backward(const AxisCall& call) {
  using Backward = RouterBackward;
  const auto& op = dynamic_cast<const Backward&>(call.op);
  const auto operands = op.input_set();
  std::string rule = "x:tH w:EH l:tE i:tk";
  if (operands.has(Backward::kCounts)) rule += " c:E";
  if (operands.has(Backward::kCuSeqlens)) rule += " s:n";
  std::string gradients;
  const auto add = [&](Backward::Input input, std::string_view operand) {
    if (!operands.has(input)) return;
    rule += fmt::format(" {}", operand);
    gradients += fmt::format("{}{}", gradients.empty() ? "" : "+", operand[0]);
  };
  add(Backward::kGradProbs, "p:tk");
  add(Backward::kGradBalanceLoss, "b!:");
  add(Backward::kGradZLoss, "z!:");
  add(Backward::kGradScoreMeans, "m:E");
  add(Backward::kGradLogits, "g:tE");
  const std::string of_weight = gradients;
  add(Backward::kAddend, "a:tH");
  rule += " ->";
  const auto outputs = op.output_set();
  if (outputs.has(Backward::kGradX)) rule += " dx:tH=" + gradients;
  if (outputs.has(Backward::kGradWeight)) rule += " dw:EH=" + of_weight;
  if (outputs.has(Backward::kGradBias)) rule += " db:E=" + of_weight;
  return follow(call, rule);
}

/// Counts of drawn experts are each rank's own tokens'.
ShardStatesOf sparse_mixer(const AxisCall& call) {
  const bool draws = dynamic_cast<const SparseMixer&>(call.op).spec().samples;
  return follow(call, draws ? "l:tE i:tk n:t s!: -> p:tk j:tk c~:E" : "l:tE i:tk -> p:tk");
}

/// Streams that collapse for good are not mixed.
ShardStatesOf stream_weights(const AxisCall& call) {
  const bool collapses = dynamic_cast<const StreamWeights&>(call.op).spec().collapses;
  return follow(call, collapses ? "l:tM s:p b:M -> q:tN" : "l:tM s:p b:M -> q:tN o:tN c:tK");
}

/// The counts of micro-batches in hand, of all data-parallel ranks: each takes those before its
/// own.
ShardStatesOf running_counts(const AxisCall& call) {
  if (factoring_of(call.axis) == Factoring::kExperts) return std::nullopt;
  for (const ShardState& state : call.inputs) {
    if (!state.is(Kind::kReplicated)) fault("counts are not those of all micro-batches in hand");
  }
  const bool among_micro_batches = call.axis == RankAxis::kDp;
  return {{among_micro_batches ? ShardState::varying() : ShardState::replicated(),
           ShardState::replicated()}};
}

/// The table of a value's pages is spread as the value; each rank has a pool of its own.
ShardStatesOf stash_pages(const AxisCall& call) {
  const ShardState pool = ShardState::replicated();
  return {{pool, pool, pool, call.inputs[StashPages::kValue]}};
}

ShardStatesOf reload_pages(const AxisCall& call) {
  const ShardState pool = ShardState::replicated();
  return {{pool, pool, pool, call.inputs[ReloadPages::kTable]}};
}

using Rule = std::variant<std::string_view, Function>;

/// By operator, in the order of a layer. Letters: t tokens, r routed rows, n and m heads' elements,
/// h hidden states, o outputs, f inner columns, E experts, k choices, v vocabulary, g segments.
constexpr std::pair<std::string_view, Rule> kRules[] = {
    {"add", add},
    {"add_bias", "x:th b:h -> y:th=x+b"},
    {"add_bias_grad", "g:th -> db:h=g"},
    {"joined_linear", joined_linear},
    {"joined_linear_dgrad", joined_linear_dgrad},
    {"joined_linear_wgrad", joined_linear_wgrad},
    {"linear", linear},
    {"linear_dgrad", "g:to w:oh a:th -> dx:th=gw+a"},
    {"linear_wgrad", "x:th g:to -> dw:oh=xg"},
    {"linear_bias_grad", "g:to -> db:o=g"},
    {"block_linear", block_linear},
    {"block_linear_dgrad", block_linear_dgrad},
    {"block_linear_wgrad", block_linear_wgrad},
    {"round_values", round_values},
    {"quantize", quantize},
    {"turn_blocks", turn_blocks},
    {"dequantize", "x:r^c -> y:r^c=x"},
    {"quantize_tokens", quantize_tokens},
    {"scale", "x:t^h a:t^h -> y:t^h=x+a"},
    {"scale_by", "x:th f!:o -> y:th=x"},
    {"multiply", "a:t^h b:t^h -> y:t^h=a"},
    {"rmsnorm", rmsnorm},
    {"rmsnorm_backward", rmsnorm_backward},
    {"unit_norm", "x:tn -> y:tn"},
    {"unit_norm_backward", "x:tn g:tn -> dx:tn=g"},
    {"square_sums", square_sums},
    {"square_sums_backward", square_sums_backward},
    {"spread_norm", "x:tn w:n s:t -> y:tn"},
    {"spread_norm_backward", "x:tn w:n s:t g:tn -> dx:tn=g ds:t=g dw:n=g"},
    // Residual streams.
    {"stream_logits", "x:tW w:MW -> l:tM r:t"},
    {"stream_logits_backward", "x:tW w:MW l:tM r:t g:tM a:tW -> dx:tW=g+a dw:MW=g"},
    {"stream_weights", stream_weights},
    {"stream_weights_backward", "l:tM s:p b:M g:tN o:tN c:tK -> dl:tM=g+o+c ds:p=g+o+c db:M=g+o+c"},
    {"collapse_streams", "x:tW p:tN -> y:tH"},
    {"collapse_streams_backward", "x:tW p:tN g:tH a:tW -> dx:tW=g+a dp:tN=g"},
    {"mix_streams", "x:tW v:tH o:tN c:tK -> y:tW"},
    {"mix_streams_backward", "x:tW v:tH o:tN c:tK g:tW -> dx:tW=g dv:tH=g do:tN=g dc:tK=g"},
    // Attention.
    {"rope", rope},
    {"rope_backward", rope},
    {"norm_rope", "x:tn w:D p:t -> y:tn r:tn"},
    {"norm_rope_backward", "x:tn w:D p:t r:tn g:tn -> dx:tn=g dw:D=g"},
    {"latent_heads", "k:tn s:tD -> y:tn=k+s v:tn=k"},
    {"latent_heads_backward", "k:tn v:tn -> dk:tn=k+v ds:tD=k"},
    {"repeat_heads", "x:tn -> y:tn=x"},
    {"sum_heads", "x:tn -> y:tn=x"},
    {"attention", attention},
    {"attention_backward", attention_backward},
    {"layer_norm", "x:tD w:D b:D -> y:tD"},
    {"layer_norm_backward", "x:tD w:D g:tD a:tD -> dx:tD=g+a dw:D=g db:D=g"},
    {"index_topk", index_topk},
    {"index_topk_entries", index_topk_entries},
    {"compress_windows", compress_windows},
    {"compress_windows_backward", compress_windows_backward},
    {"window_choice", window_choice},
    {"join_rows", "a:th b:th -> y:th=a+b"},
    {"split_rows", "x:th -> a:th=x b:th=x"},
    {"sparse_attention", sparse_attention},
    {"sparse_attention_backward", sparse_attention_backward},
    {"attention_sink", attention_sink},
    {"attention_sink_backward", attention_sink_backward},
    {"ring_attention", attention},
    {"max_logits", max_logits},
    {"ring_attention_backward", attention_backward},
    // Delta rules and state-space scan.
    {"deal_tokens", deal_tokens},
    {"collect_tokens", deal_tokens},
    {"short_conv", short_conv},
    {"short_conv_backward", short_conv_backward},
    {"delta_gates", "a:tn b:tn l:n u:n -> g:tn e:tn"},
    {"delta_gates_backward", "a:tn b:tn l:n u:n g:tn e:tn -> da:tn=g db:tn=e dl:n=g du:n=g"},
    {"gated_delta", gated_delta},
    {"gated_delta_backward", gated_delta},
    {"kda_gates", "a:tn b:tn l:n u:n -> g:tn e:tn"},
    {"kda_gates_backward", "a:tn b:tn l:n u:n g:tn e:tn -> da:tn=g db:tn=e dl:n=g du:n=g"},
    {"kda", gated_delta},
    {"kda_backward", gated_delta},
    {"ssd_scan", ssd_scan},
    {"ssd_scan_backward", ssd_scan_backward},
    {"gated_group_norm", "x:tn z:tn w:n -> y:tn"},
    {"gated_group_norm_backward", "x:tn z:tn w:n g:tn -> dx:tn=g dz:tn=g dw:n=g"},
    {"gated_norm", "x:tn z:tn w:D -> y:tn"},
    {"gated_norm_backward", "x:tn z:tn w:D g:tn -> dx:tn=g dz:tn=g dw:D=g"},
    // MLPs and experts.
    {"activation", "x:tf -> y:tf"},
    {"activation_backward", "x:tf g:tf -> dx:tf=g"},
    {"sigmoid_gate", sigmoid_gate},
    {"sigmoid_gate_backward", sigmoid_gate_backward},
    {"jitter", "x:tH n:t s!: -> y:tH=x"},
    {"sinkhorn", sinkhorn},
    {"top_p", "p:tk i:tk -> q:tk j:tk c~:E"},
    {"top_p_backward", "p:tk i:tk g:tk -> dp:tk=g"},
    {"sparse_mixer", sparse_mixer},
    {"sparse_mixer_backward", "l:tE i:tk g:tk -> dl:tE=g"},
    {"expert_scale", "p:tk i:tk s:E -> q:tk=p"},
    {"expert_scale_backward", "p:tk i:tk s:E g:tk -> dp:tk=g ds:E=g"},
    {"zero_experts", "x:tH p:tk i:tk -> y:tH=xp j:tk"},
    {"zero_experts_backward", "x:tH p:tk i:tk g:tH -> dx:tH=gp dp:tk=gx"},
    {"hash_experts", "i:t w:Vk -> e:tk"},
    {"router", router},
    {"router_backward", router_backward},
    {"balance_statistics", "l:tE i:tk s:t -> c~:gE q~:gE"},
    {"balance_statistics_backward", "g:gE l:tE s:t -> dl:tE=g"},
    {"balance_loss", "c:gE q:gE p:E -> y:=q"},
    {"balance_loss_backward", "g!: c:gE p:E -> dq:gE=g"},
    {"running_counts", running_counts},
    {"capacity_limit", capacity_limit},
    {"route_map", route_map},
    {"dispatch_plan", dispatch_plan},
    {"dispatch_plan_on_device", dispatch_plan},
    {"clone_plan", clone_plan},
    {"clone_route", "i:t^k m:t^k o:* s:* b:* e:* -> h:t^k c:t^k"},
    {"clone_weights", clone_weights},
    {"return_clones", return_clones},
    {"add_clones", add_clones},
    {"destinations", "i:t^k -> m:t^k"},
    {"permute_choices", permute_choices},
    {"slot_experts", "c:s^ -> i:s^"},
    {"stash_pages", stash_pages},
    {"reload_pages", reload_pages},
    {"permute", permute},
    {"permute_probs", permute},
    {"unpermute", unpermute},
    {"unpermute_probs", unpermute},
    {"unpermute_weighted", unpermute_weighted},
    {"unpermute_weighted_backward", unpermute_weighted_backward},
    {"scaled_grouped_matmul", "a:r^h w:f^h o:n^ -> y:r^f=aw"},
    {"scaled_grouped_wgrad", "n:fr^ x:hr^ s:r^f t:r^h o:n^ -> dw:f^h=nx"},
    {"grouped_matmul", grouped_matmul},
    {"grouped_matmul_wgrad", grouped_matmul_wgrad},
    {"grouped_matmul_wgrad_of_value", grouped_matmul_wgrad},
    {"expert_bias", expert_bias},
    {"expert_bias_backward", expert_bias_backward},
    {"expert_bias_backward_of_value", expert_bias_backward},
    {"expert_activation", expert_activation},
    {"expert_activation_backward", expert_activation_backward},
    {"activated_product", activated_product},
    {"activation_grad_product", activation_grad_product},
    {"block_topology", "o:n^ -> a:b^ c:b^ d:b^ e:b^ f:b^ n:"},
    {"sdd", block_sparse_product},
    {"dsd", block_sparse_product},
    {"dds", block_sparse_product},
    {"block_sparse_activation", "x:r^f p:r^ o:n^ c:n^ -> y:r^f"},
    {"block_sparse_activation_backward", "g:r^f x:r^f p:r^ o:n^ -> dx:r^f=g dp:r^=g"},
    // The model's ends.
    {"embedding", embedding},
    {"embedding_backward", embedding_backward},
    {"linear_cross_entropy", linear_cross_entropy},
    {"linear_cross_entropy_backward", linear_cross_entropy_backward},
    {"linear_cross_entropy_fused", linear_cross_entropy_fused},
    {"vocab_lse", "x:tH w:vH l:t c:v -> z:t b:t"},
    {"vocab_lse_backward", vocab_lse_backward},
    {"vocab_loss", "z:t b:t l:t s!: f:t -> y+: o:t"},
    {"vocab_loss_backward", "z:t b:t l:t s!: g!: f:t -> dz:t=g db:t=g"},
    // Exchanges.
    {"all_gather", all_gather},
    {"all_gather_v", all_gather},
    {"reduce_scatter", reduce_scatter},
    {"reduce_scatter_v", reduce_scatter},
    {"all_reduce_constant", all_reduce},
    {"all_to_all", all_to_all},
    {"all_to_all_v", all_to_all_v},
    {"all_to_all_v_on_device", all_to_all_v},
    {"gather_heads", gather_heads},
    {"scatter_heads", scatter_heads},
};

const std::map<std::string_view, Rule>& rules() {
  static const std::map<std::string_view, Rule> kByName(std::begin(kRules), std::end(kRules));
  return kByName;
}

}  // namespace
}  // namespace shard_rules

bool has_shard_rule(std::string_view name) {
  return shard_rules::rules().contains(name);
}

ShardStatesOf infer_axis(const AxisCall& call) {
  const auto found = shard_rules::rules().find(call.op.name());
  ensure(found != shard_rules::rules().end(), "operator {} has no rule of how it is spread",
         call.op.name());
  if (const auto* text = std::get_if<std::string_view>(&found->second))
    return shard_rules::follow(call, *text);
  return std::get<shard_rules::Function>(found->second)(call);
}

}  // namespace tessera
