#include <algorithm>
#include <cmath>

#include "model/dispatch/dispatch_bounds.h"
#include "model/dispatch/row_exchange.h"
#include "ops/destinations/destinations.h"
#include "ops/permute/permute.h"

namespace tessera {
namespace {

/// One copy of a token goes to each rank of EP that has experts for it, with all its choices and
/// their probabilities; there its rows are laid out by expert, and what they give is weighted and
/// added up before one row comes back. An all-to-all moves a row for each expert instead, and an
/// all-gather one to all ranks (Megatron-Core MoE, section 4.2: what DeepEP and HybridEP send).
class DeduplicatedPhases final : public DispatchPhases {
 public:
  using DispatchPhases::DispatchPhases;

  RowSet pack(const RowSet& tokens, DispatchedRows& result) override {
    num_tokens_ = num_tokens(tokens);
    const ValueId members =
        program_.add1(make_destinations({.members = spec_.ep->size(),
                                         .experts_each = spec_.local_experts().count}),
                      {tokens.expert_idx}, "destinations");
    const auto map = program_.add(make_route_map(sent_layout()), {members},
                                  {"sent_row_of", "sent_source", "sent_offsets", "sent_num_rows",
                                   "sent_dropped", "sent_counts_kept"});
    const ValueId row_of = map[RouteMapOutput::kRowOfTK];
    const ValueId source = map[RouteMapOutput::kSourceR];
    result.at_source = {row_of, source};
    return {.rows = program_.add1(make_permute(), {tokens.rows, source, row_of}, "sent_in"),
            .probs = program_.add1(make_permute(), {tokens.probs, source, row_of}, "sent_probs"),
            .expert_idx =
                program_.add1(make_permute_choices(), {tokens.expert_idx, source}, "sent_experts"),
            .counts = map[RouteMapOutput::kCountsKept]};
  }

  RowSet exchange(const RowSet& packed, DispatchedRows& result) override {
    if (!is_bounded()) plan_exchange(program_, spec_, plan_spec(), packed, result.counts);
    const auto send = [&](ValueId x, const std::string& name) {
      return is_bounded() ? send_slots(program_, spec_, x, name)
                          : send_counted(program_, spec_, result.counts, x, name);
    };
    const RowSet arrived{.rows = send(packed.rows, "arrived_rows"),
                         .probs = send(packed.probs, "arrived_probs"),
                         .expert_idx = send(packed.expert_idx, "arrived_experts")};
    if (!spec_.early_probs) result.probs_TK = arrived.probs;
    return arrived;
  }

  void unpack(const RowSet& arrived, DispatchedRows& result) override {
    const double choices = static_cast<double>(spec_.top_k) / share_of_tokens();
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
    return is_bounded() ? return_slots(program_, spec_, packed)
                        : return_counted(program_, spec_, dispatched, packed);
  }
  ValueId unpack_back(const DispatchedRows& dispatched, ValueId arrived) override {
    return add_up(dispatched.at_source, arrived, -1, "moe_out");
  }

 private:
  bool is_bounded() const { return spec_.exchange == ExchangeSizes::kBounded; }
  /// Of a rank's tokens those that go to another, where routing is balanced.
  double share_of_tokens() const { return reach_of_rank(spec_.routed(), spec_.ep->size()); }

  /// Of this rank's tokens, rank by rank of EP.
  RouteMapSpec sent_layout() const {
    RouteMapSpec layout{.num_experts = spec_.ep->size(), .top_k = spec_.top_k};
    layout.balanced_choices = static_cast<double>(spec_.ep->size()) * share_of_tokens();
    if (!is_bounded()) return layout;
    layout.slot_experts = 1;
    layout.slot_rows = num_tokens_;
    return layout;
  }

  DispatchPlanSpec plan_spec() const {
    DispatchPlanSpec plan = plan_of_members(spec_, 1);
    const auto balanced = [&](int64_t most) {
      return std::min(
          most, static_cast<int64_t>(std::ceil(static_cast<double>(most) * share_of_tokens())));
    };
    plan.max_received = spec_.ep->size() * num_tokens_;
    plan.max_gathered = spec_.experts->size() * num_tokens_;
    plan.balanced_received = balanced(plan.max_received);
    plan.balanced_gathered = balanced(plan.max_gathered);
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
