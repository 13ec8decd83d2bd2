#include <algorithm>

#include "model/dispatch/dispatch_bounds.h"
#include "model/dispatch/dispatch_sorted_phases.h"
#include "model/dispatch/row_exchange.h"

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
    const auto plan = plan_exchange(program_, spec_, plan_spec(packed), packed, result.sent.counts);
    const auto send = [&](ValueId x, const std::string& name) {
      return send_counted(program_, spec_, result.sent.counts, x, name);
    };
    RowSet arrived{.rows = send(packed.rows, "arrived_rows"),
                   .expert_idx = plan[DispatchPlanOutput::kExpertIdx]};
    if (packed.probs >= 0) arrived.probs = send(packed.probs, "arrived_probs");
    return arrived;
  }

  ValueId exchange_back(const DispatchedRows& dispatched, ValueId packed) override {
    return return_counted(program_, spec_, dispatched.sent, packed);
  }

 private:
  /// What can arrive over EP, and then stand here gathered over ETP. Without EP those are the
  /// packed rows themselves.
  DispatchPlanSpec plan_spec(const RowSet& packed) const {
    DispatchPlanSpec plan = plan_of_members(spec_, spec_.local_experts().count);
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
};

}  // namespace

std::unique_ptr<DispatchPhases> make_all_to_all_phases(Program& program, const DispatchSpec& spec) {
  return std::make_unique<AllToAllPhases>(program, spec);
}

}  // namespace tessera
