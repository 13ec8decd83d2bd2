#pragma once

#include <string>
#include <vector>

#include "model/dispatch/dispatch_phases.h"
#include "ops/dispatch_plan/dispatch_plan.h"

/// Rows on their way to the ranks of EP, and from there to all that share those ranks' experts'
/// inner columns (ETP), and the way back (Parallel Folding, figure 2). Where EP or ETP is 1 its
/// step is left out.
namespace tessera {

/// Of the ranks of spec.experts; EP's have `each` experts, or other things that rows are counted
/// by. Bounds are left to the caller.
DispatchPlanSpec plan_of_members(const DispatchSpec& spec, int64_t each);

/// Tells all ranks how many rows go where, by `packed.counts`; `counts` is what the exchanges there
/// and back need. Returns the outputs of DispatchPlan.
std::vector<ValueId> plan_exchange(Program& program, const DispatchSpec& spec,
                                   const DispatchPlanSpec& plan, const RowSet& packed,
                                   ExchangeCounts& counts);
ValueId send_counted(Program& program, const DispatchSpec& spec, const ExchangeCounts& counts,
                     ValueId x, const std::string& name);
/// Partial sums of ETP are added up.
ValueId return_counted(Program& program, const DispatchSpec& spec, const SentRows& sent,
                       ValueId rows);

/// The same with slots of fixed size for each rank of EP.
ValueId send_slots(Program& program, const DispatchSpec& spec, ValueId x, const std::string& name);
ValueId return_slots(Program& program, const DispatchSpec& spec, ValueId rows);

}  // namespace tessera
