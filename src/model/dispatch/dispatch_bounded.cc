#include "model/dispatch/dispatch_bounds.h"
#include "model/dispatch/dispatch_sorted_phases.h"
#include "ops/collective/collective.h"
#include "ops/slot_experts/slot_experts.h"

namespace tessera {
namespace {

/// The all-to-all kind with exchanges of fixed sizes: what a rank sends to another stands in a slot
/// of as many rows as that can be at most, with padding behind them, and all slots travel whole. So
/// no rank needs to know sizes but from the tensors themselves. Rows arrive in the order of the
/// exact kind, and the experts see the same bits.
class BoundedPhases final : public SortedPhases {
 public:
  using SortedPhases::SortedPhases;

  RowSet exchange(const RowSet& packed, DispatchedRows& /*result*/) override {
    const ValueId counts = send(packed.counts, "arrived_counts");
    RowSet arrived{.rows = send(packed.rows, "arrived_rows"),
                   .expert_idx = program_.add1(
                       make_slot_experts({.num_experts = spec_.local_experts().count,
                                          .slot_rows = max_rows_to_peer(spec_, num_tokens_)}),
                       {counts}, "arrived_experts")};
    if (packed.probs >= 0) arrived.probs = send(packed.probs, "arrived_probs");
    return arrived;
  }

  ValueId exchange_back(const DispatchedRows& /*dispatched*/, ValueId packed) override {
    ValueId rows = packed;
    if (spec_.etp->size() > 1)
      rows = program_.add1(make_reduce_scatter(spec_.etp), {rows}, "summed_rows");
    if (spec_.ep->size() > 1)
      rows = program_.add1(make_all_to_all(spec_.ep), {rows}, "returned_rows");
    return rows;
  }

 protected:
  RouteMapSpec sent_layout() const override {
    RouteMapSpec layout = source_layout(num_tokens_);
    layout.slot_experts = spec_.local_experts().count;
    layout.slot_rows = max_rows_to_peer(spec_, num_tokens_);
    return layout;
  }

 private:
  /// A part for each rank of EP, to all ranks that share its experts.
  ValueId send(ValueId x, const std::string& name) {
    const bool gathers = spec_.etp->size() > 1;
    if (spec_.ep->size() > 1)
      x = program_.add1(make_all_to_all(spec_.ep), {x}, gathers ? "received" : name);
    return gathers ? program_.add1(make_all_gather(spec_.etp), {x}, name) : x;
  }
};

}  // namespace

std::unique_ptr<DispatchPhases> make_bounded_phases(Program& program, const DispatchSpec& spec) {
  return std::make_unique<BoundedPhases>(program, spec);
}

}  // namespace tessera
