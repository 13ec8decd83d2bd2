#include <algorithm>

#include "model/dispatch/dispatch_bounds.h"
#include "model/dispatch/dispatch_sorted_phases.h"
#include "ops/collective/ragged_collective.h"
#include "ops/dispatch_plan/dispatch_plan.h"

namespace tessera {
namespace {

/// Rows go to the ranks of their experts by all-to-all over EP, then to all that share those
/// experts' inner columns by all-gather over ETP; the experts' partial sums come back by
/// reduce-scatter and all-to-all (Parallel Folding, figure 2). Where EP or ETP is 1 its step is
/// left out.
class AllToAllPhases final : public SortedPhases {
 public:
  using SortedPhases::SortedPhases;

  RowSet exchange(const RowSet& packed, DispatchedRows& result) override {
    const auto plan = make_plan(packed, result);
    const ExchangeCounts& counts = result.counts;
    RowSet arrived{.rows = send(packed.rows, counts, "arrived_rows"),
                   .expert_idx = plan[DispatchPlanOutput::kExpertIdx]};
    if (packed.probs >= 0) arrived.probs = send(packed.probs, counts, "arrived_probs");
    return arrived;
  }

  ValueId exchange_back(const DispatchedRows& dispatched, ValueId packed) override {
    const ExchangeCounts& counts = dispatched.counts;
    ValueId rows = packed;
    if (spec_.etp->size() > 1) {
      rows = program_.add1(make_reduce_scatter_v(spec_.etp, counts.max_received),
                           {rows, counts.gather_rows, counts.received}, "summed_rows");
    }
    if (spec_.ep->size() > 1) {
      const ValueType& sent = program_.type(dispatched.at_source.source);
      rows = program_.add1(make_all_to_all_v(spec_.ep, sent.shape[0]),
                           {rows, counts.receive_rows, counts.send_rows, sent.extent.value()},
                           "returned_rows");
    }
    return rows;
  }

 private:
  /// What can arrive over EP, and then stand here gathered over ETP. Without EP those are the
  /// packed rows themselves.
  DispatchPlanSpec plan_spec(const RowSet& packed) const {
    DispatchPlanSpec plan{.first_experts = {},
                          .etp_size = spec_.etp->size(),
                          .ep_rank = spec_.ep->rank(),
                          .etp_rank = spec_.etp->rank()};
    for (int64_t e = 0; e <= spec_.ep->size(); ++e) {
      plan.first_experts.push_back(e * spec_.local_experts().count);
    }
    plan.max_received = spec_.ep->size() == 1
                            ? program_.type(packed.rows).shape[0]
                            : max_arriving_rows(spec_, spec_.ep->size(), num_tokens_);
    plan.max_gathered = spec_.ep->size() == 1
                            ? plan.etp_size * plan.max_received
                            : max_arriving_rows(spec_, spec_.experts->size(), num_tokens_);
    const auto balanced = [&](int64_t num_ranks, int64_t most) {
      return std::min(most, balanced_arriving_rows(spec_, num_ranks, num_tokens_));
    };
    plan.balanced_received = balanced(spec_.ep->size(), plan.max_received);
    plan.balanced_gathered = balanced(spec_.experts->size(), plan.max_gathered);
    return plan;
  }

  std::vector<ValueId> make_plan(const RowSet& packed, DispatchedRows& result) {
    const DispatchPlanSpec spec = plan_spec(packed);
    const ValueId counts =
        program_.add1(make_all_gather(spec_.experts), {packed.counts}, "counts_of_all");
    const auto plan = program_.add(make_dispatch_plan(spec), {counts},
                                   {"send_rows", "receive_rows", "num_received", "gather_rows",
                                    "num_gathered", "arrived_experts"});
    result.counts = {.send_rows = plan[DispatchPlanOutput::kSendRows],
                     .receive_rows = plan[DispatchPlanOutput::kReceiveRows],
                     .received = plan[DispatchPlanOutput::kReceived],
                     .gather_rows = plan[DispatchPlanOutput::kGatherRows],
                     .gathered = plan[DispatchPlanOutput::kGathered],
                     .max_received = spec.max_received,
                     .max_gathered = spec.max_gathered};
    if (spec_.ep->size() == 1) result.counts.received = program_.type(packed.rows).extent.value();
    if (spec_.etp->size() == 1) result.counts.received = result.counts.gathered;
    return plan;
  }

  ValueId send(ValueId x, const ExchangeCounts& counts, const std::string& name) {
    const bool gathers = spec_.etp->size() > 1;
    if (spec_.ep->size() > 1) {
      x = program_.add1(make_all_to_all_v(spec_.ep, counts.max_received),
                        {x, counts.send_rows, counts.receive_rows, counts.received},
                        gathers ? "received" : name);
    }
    if (!gathers) return x;
    return program_.add1(make_all_gather_v(spec_.etp, counts.max_gathered),
                         {x, counts.gather_rows, counts.gathered}, name);
  }
};

}  // namespace

std::unique_ptr<DispatchPhases> make_all_to_all_phases(Program& program, const DispatchSpec& spec) {
  return std::make_unique<AllToAllPhases>(program, spec);
}

}  // namespace tessera
