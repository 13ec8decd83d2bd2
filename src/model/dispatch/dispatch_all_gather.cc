#include "model/dispatch/dispatch_phases.h"
#include "ops/collective/collective.h"

namespace tessera {
namespace {

/// All tokens go to all ranks that hold the layer's experts; each lays out the rows of its own, and
/// the outputs' sums for each token are reduce-scattered back (MegaScale-MoE, section 3.2, figure
/// 6). Probabilities go along whatever their place: the sums are weighted where they are made.
class AllGatherPhases final : public DispatchPhases {
 public:
  using DispatchPhases::DispatchPhases;

  RowSet pack(const RowSet& tokens, DispatchedRows& /*result*/) override {
    num_tokens_ = num_tokens(tokens);
    return tokens;
  }

  RowSet exchange(const RowSet& packed, DispatchedRows& result) override {
    const auto gather = [&](ValueId x, const std::string& name) {
      return program_.add1(make_all_gather(spec_.experts), {x}, name);
    };
    const RowSet arrived{.rows = gather(packed.rows, "arrived_rows"),
                         .probs = gather(packed.probs, "arrived_probs"),
                         .expert_idx = gather(packed.expert_idx, "arrived_experts")};
    if (!spec_.early_probs) result.probs_TK = arrived.probs;
    return arrived;
  }

  void unpack(const RowSet& arrived, DispatchedRows& result) override {
    const RouteMapSpec layout = arrival_layout({.num_experts = spec_.num_experts,
                                                .top_k = spec_.top_k,
                                                .local_experts = spec_.local_experts()},
                                               num_tokens_);
    deliver(lay_out(layout, arrived, "expert"), result);
  }

  ValueId pack_back(const DispatchedRows& dispatched, ValueId expert_out) override {
    return add_up(dispatched.at_experts, expert_out, dispatched.probs_TK, "expert_sums");
  }
  ValueId exchange_back(const DispatchedRows& /*dispatched*/, ValueId packed) override {
    return program_.add1(make_reduce_scatter(spec_.experts), {packed}, "moe_out");
  }
  ValueId unpack_back(const DispatchedRows& /*dispatched*/, ValueId arrived) override {
    return arrived;
  }

 private:
  int64_t num_tokens_ = 0;
};

}  // namespace

std::unique_ptr<DispatchPhases> make_all_gather_phases(Program& program, const DispatchSpec& spec) {
  return std::make_unique<AllGatherPhases>(program, spec);
}

}  // namespace tessera
