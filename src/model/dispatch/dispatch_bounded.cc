#include "model/dispatch/dispatch_bounds.h"
#include "model/dispatch/dispatch_sorted_phases.h"
#include "model/dispatch/row_exchange.h"
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
    const auto send = [&](ValueId x, const std::string& name) {
      return send_slots(program_, spec_, x, name);
    };
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
    return return_slots(program_, spec_, packed);
  }

 protected:
  RouteMapSpec sent_layout() const override {
    RouteMapSpec layout = source_layout(num_tokens_);
    layout.slot_experts = spec_.local_experts().count;
    layout.slot_rows = max_rows_to_peer(spec_, num_tokens_);
    return layout;
  }
};

}  // namespace

std::unique_ptr<DispatchPhases> make_bounded_phases(Program& program, const DispatchSpec& spec) {
  return std::make_unique<BoundedPhases>(program, spec);
}

}  // namespace tessera
