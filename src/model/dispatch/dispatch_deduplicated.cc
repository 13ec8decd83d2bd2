#include <algorithm>
#include <cmath>

#include "model/dispatch/dispatch_bounds.h"
#include "model/dispatch/row_exchange.h"
#include "ops/destinations/destinations.h"
#include "ops/permute/permute.h"

namespace tessera {
namespace {

/// One exchange that takes a token once to each rank of `spec.ep` with experts for it. Rank r of
/// them stands for `experts_each` experts, from first_expert + r · experts_each on.
struct Hop {
  DispatchSpec spec;
  PlanReach reach = PlanReach::kAll;
  int64_t first_expert = 0;
  int64_t experts_each = 1;
  int64_t num_tokens = 0;  ///< at a rank before it, at most
  /// With balanced routing: the tokens that are there, and the share of them that goes to each
  /// rank.
  double balanced_tokens = 0;
  double share = 1;
  std::string name;  ///< what values' names begin with
};

/// One copy of a token goes to each rank of EP that has experts for it, with all its choices and
/// their probabilities; there its rows are laid out by expert, and what they give is weighted and
/// added up before one row comes back. An all-to-all moves a row for each expert instead, and an
/// all-gather one to all ranks. Hierarchically a copy goes to each node with such ranks, to the
/// rank in the sender's place, which passes it on to these (Megatron-Core MoE, section 4.2: what
/// DeepEP and HybridEP send).
class DeduplicatedPhases final : public DispatchPhases {
 public:
  using DispatchPhases::DispatchPhases;

  RowSet pack(const RowSet& tokens, DispatchedRows& result) override {
    num_tokens_ = num_tokens(tokens);
    return pack(first_hop(), tokens, result.sent);
  }

  RowSet exchange(const RowSet& packed, DispatchedRows& result) override {
    RowSet arrived = exchange(first_hop(), packed, result.sent);
    if (spec_.by_node) {
      const Hop hop = hop_within();
      arrived = exchange(hop, pack(hop, arrived, result.passed_on), result.passed_on);
    }
    if (!spec_.early_probs) result.probs_TK = arrived.probs;
    return arrived;
  }

  void unpack(const RowSet& arrived, DispatchedRows& result) override {
    const double choices = static_cast<double>(spec_.top_k) / reach();
    const RouteMapSpec layout = arrival_layout({.num_experts = spec_.num_experts,
                                                .top_k = spec_.top_k,
                                                .local_experts = spec_.local_experts(),
                                                .balanced_choices = choices},
                                               num_tokens_);
    deliver(lay_out(layout, arrived, "expert"), result);
  }

  ValueId pack_back(const DispatchedRows& dispatched, ValueId expert_out) override {
    return add_up(dispatched.at_experts, expert_out, dispatched.probs_TK, "expert_sums");
  }
  ValueId exchange_back(const DispatchedRows& dispatched, ValueId packed) override {
    if (spec_.by_node) {
      packed = come_back(hop_within().spec, dispatched.passed_on, packed);
      packed = add_up(dispatched.passed_on.map, packed, -1, "node_sums");
    }
    return come_back(first_hop().spec, dispatched.sent, packed);
  }
  ValueId unpack_back(const DispatchedRows& dispatched, ValueId arrived) override {
    return add_up(dispatched.sent.map, arrived, -1, "moe_out");
  }

 private:
  bool is_bounded() const { return spec_.exchange == ExchangeSizes::kBounded; }
  /// Of a rank's tokens those that have experts on another, where routing is balanced.
  double reach() const { return balanced_reach(spec_, spec_.ep->size()); }

  /// To the ranks of EP, or to the nodes.
  Hop first_hop() const {
    Hop hop{.spec = spec_,
            .experts_each = spec_.local_experts().count,
            .num_tokens = num_tokens_,
            .balanced_tokens = static_cast<double>(num_tokens_),
            .share = reach(),
            .name = "sent"};
    if (!spec_.by_node) return hop;
    const CommunicatorPtr& nodes = spec_.by_node->nodes;
    hop.reach = PlanReach::kNodes;
    hop.experts_each *= spec_.by_node->ep->size();
    hop.share = balanced_reach(spec_, nodes->size());
    hop.spec.ep = hop.spec.experts = nodes;
    hop.spec.etp = make_single_communicator("etp");
    return hop;
  }

  /// From where tokens came to the node to its ranks.
  Hop hop_within() const {
    const NodeGroups& node = *spec_.by_node;
    const Hop before = first_hop();
    Hop hop{.spec = spec_,
            .reach = PlanReach::kWithin,
            .first_expert = node.nodes->rank() * before.experts_each,
            .experts_each = spec_.local_experts().count,
            .num_tokens = node.nodes->size() * num_tokens_,
            .balanced_tokens = static_cast<double>(node.nodes->size() * num_tokens_) * before.share,
            .share = reach() / before.share,
            .name = "passed"};
    hop.spec.ep = node.ep;
    hop.spec.experts = node.experts;
    return hop;
  }

  RowSet pack(const Hop& hop, const RowSet& tokens, SentRows& sent) {
    const int64_t members = hop.spec.ep->size();
    const ValueId destinations =
        program_.add1(make_destinations({.members = members,
                                         .experts_each = hop.experts_each,
                                         .first_expert = hop.first_expert}),
                      {tokens.expert_idx}, hop.name + "_to");
    RouteMapSpec layout{.num_experts = members, .top_k = spec_.top_k};
    layout.balanced_choices = static_cast<double>(members) * hop.share;
    if (is_bounded()) {
      layout.slot_experts = 1;
      layout.slot_rows = hop.num_tokens;
    }
    std::vector<std::string> names = {"_row_of",   "_source",  "_offsets",
                                      "_num_rows", "_dropped", "_counts_kept"};
    for (std::string& name : names) name.insert(0, hop.name);
    const auto map = program_.add(make_route_map(layout), {destinations}, names);
    const ValueId row_of = map[RouteMapOutput::kRowOfTK];
    const ValueId source = map[RouteMapOutput::kSourceR];
    sent.map = {row_of, source};
    const auto take = [&](ValueId x, const char* name) {
      return program_.add1(make_permute(), {x, source, row_of}, hop.name + name);
    };
    return {.rows = take(tokens.rows, "_in"),
            .probs = take(tokens.probs, "_probs"),
            .expert_idx = program_.add1(make_permute_choices(), {tokens.expert_idx, source},
                                        hop.name + "_experts"),
            .counts = map[RouteMapOutput::kCountsKept]};
  }

  RowSet exchange(const Hop& hop, const RowSet& packed, SentRows& sent) {
    if (!is_bounded()) plan_exchange(program_, hop.spec, plan_spec(hop), packed, sent.counts);
    const auto send = [&](ValueId x, const std::string& name) {
      return is_bounded() ? send_slots(program_, hop.spec, x, name)
                          : send_counted(program_, hop.spec, sent.counts, x, name);
    };
    const std::string name = hop.reach == PlanReach::kNodes ? "node" : "arrived";
    // The layout by expert is found while the rows are under way.
    const ValueId expert_idx = send(packed.expert_idx, name + "_experts");
    const ValueId probs = send(packed.probs, name + "_probs");
    return {.rows = send(packed.rows, name + "_rows"), .probs = probs, .expert_idx = expert_idx};
  }

  ValueId come_back(const DispatchSpec& spec, const SentRows& sent, ValueId rows) {
    return is_bounded() ? return_slots(program_, spec, rows)
                        : return_counted(program_, spec, sent, rows);
  }

  static DispatchPlanSpec plan_spec(const Hop& hop) {
    DispatchPlanSpec plan = plan_of_members(hop.spec, 1);
    plan.reach = hop.reach;
    const auto balanced = [&](int64_t ranks) {
      const double rows = static_cast<double>(ranks) * hop.balanced_tokens * hop.share;
      return std::min(ranks * hop.num_tokens, static_cast<int64_t>(std::ceil(rows)));
    };
    plan.max_received = hop.spec.ep->size() * hop.num_tokens;
    plan.max_gathered = hop.spec.experts->size() * hop.num_tokens;
    plan.balanced_received = balanced(hop.spec.ep->size());
    plan.balanced_gathered = balanced(hop.spec.experts->size());
    return plan;
  }

  int64_t num_tokens_ = 0;  ///< of this rank, once they are packed
};

}  // namespace

std::unique_ptr<DispatchPhases> make_deduplicated_phases(Program& program,
                                                         const DispatchSpec& spec) {
  return std::make_unique<DeduplicatedPhases>(program, spec);
}

}  // namespace tessera
