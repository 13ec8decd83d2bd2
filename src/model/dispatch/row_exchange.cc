#include "model/dispatch/row_exchange.h"

#include "ops/collective/ragged_collective.h"

namespace tessera {
namespace {

/// All-gathers of counted rows over ETP need the host.
CountsOf counts_of(const DispatchSpec& spec) {
  const bool direct = spec.exchange == ExchangeSizes::kDirect && spec.etp->size() == 1;
  return direct ? CountsOf::kDevice : CountsOf::kHost;
}

}  // namespace

DispatchPlanSpec plan_of_members(const DispatchSpec& spec, int64_t each) {
  DispatchPlanSpec plan{.first_experts = {},
                        .etp_size = spec.etp->size(),
                        .ep_rank = spec.ep->rank(),
                        .etp_rank = spec.etp->rank(),
                        .tells_the_host = counts_of(spec) == CountsOf::kHost};
  for (int64_t e = 0; e <= spec.ep->size(); ++e) plan.first_experts.push_back(e * each);
  return plan;
}

std::vector<ValueId> plan_exchange(Program& program, const DispatchSpec& spec,
                                   const DispatchPlanSpec& plan, const RowSet& packed,
                                   ExchangeCounts& counts) {
  const ValueId of_all =
      program.add1(make_all_gather(spec.experts), {packed.counts}, "counts_of_all");
  auto planned = program.add(make_dispatch_plan(plan), {of_all},
                             {"send_rows", "receive_rows", "num_received", "gather_rows",
                              "num_gathered", "arrived_experts"});
  counts = {.send_rows = planned[DispatchPlanOutput::kSendRows],
            .receive_rows = planned[DispatchPlanOutput::kReceiveRows],
            .received = planned[DispatchPlanOutput::kReceived],
            .gather_rows = planned[DispatchPlanOutput::kGatherRows],
            .gathered = planned[DispatchPlanOutput::kGathered],
            .max_received = plan.max_received,
            .max_gathered = plan.max_gathered};
  if (spec.ep->size() == 1) counts.received = program.type(packed.rows).extent.value();
  if (spec.etp->size() == 1) counts.received = counts.gathered;
  return planned;
}

ValueId send_counted(Program& program, const DispatchSpec& spec, const ExchangeCounts& counts,
                     ValueId x, const std::string& name) {
  const bool gathers = spec.etp->size() > 1;
  if (spec.ep->size() > 1) {
    x = program.add1(make_all_to_all_v(spec.ep, counts.max_received, counts_of(spec)),
                     {x, counts.send_rows, counts.receive_rows, counts.received},
                     gathers ? "received" : name);
  }
  if (!gathers) return x;
  return program.add1(make_all_gather_v(spec.etp, counts.max_gathered),
                      {x, counts.gather_rows, counts.gathered}, name);
}

ValueId return_counted(Program& program, const DispatchSpec& spec, const SentRows& sent,
                       ValueId rows) {
  const ExchangeCounts& counts = sent.counts;
  if (spec.etp->size() > 1) {
    rows = program.add1(make_reduce_scatter_v(spec.etp, counts.max_received),
                        {rows, counts.gather_rows, counts.received}, "summed_rows");
  }
  if (spec.ep->size() == 1) return rows;
  const ValueType& source = program.type(sent.map.source);
  return program.add1(make_all_to_all_v(spec.ep, source.shape[0], counts_of(spec)),
                      {rows, counts.receive_rows, counts.send_rows, source.extent.value()},
                      "returned_rows");
}

ValueId send_slots(Program& program, const DispatchSpec& spec, ValueId x, const std::string& name) {
  const bool gathers = spec.etp->size() > 1;
  if (spec.ep->size() > 1)
    x = program.add1(make_all_to_all(spec.ep), {x}, gathers ? "received" : name);
  return gathers ? program.add1(make_all_gather(spec.etp), {x}, name) : x;
}

ValueId return_slots(Program& program, const DispatchSpec& spec, ValueId rows) {
  if (spec.etp->size() > 1)
    rows = program.add1(make_reduce_scatter(spec.etp), {rows}, "summed_rows");
  if (spec.ep->size() > 1) rows = program.add1(make_all_to_all(spec.ep), {rows}, "returned_rows");
  return rows;
}

}  // namespace tessera
