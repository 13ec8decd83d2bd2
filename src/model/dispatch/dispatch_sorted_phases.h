#pragma once

#include "model/dispatch/dispatch_phases.h"

namespace tessera {

/// What the kinds have in common that send each rank the rows of its experts: rows are sorted by
/// expert before the exchange and again behind it, and each token's are added up where they were
/// sorted. How they travel is left to each kind.
class SortedPhases : public DispatchPhases {
 public:
  using DispatchPhases::DispatchPhases;

  RowSet pack(const RowSet& tokens, DispatchedRows& result) final {
    num_tokens_ = num_tokens(tokens);
    const LaidOut laid_out = lay_out(sent_layout(), tokens, "sent");
    result.sent.map = laid_out.map;
    if (result.dropped < 0) result.dropped = laid_out.dropped;
    return laid_out.rows;
  }

  void unpack(const RowSet& arrived, DispatchedRows& result) final {
    const RouteMapSpec layout =
        arrival_layout({.num_experts = spec_.local_experts().count, .top_k = 1}, num_tokens_);
    deliver(lay_out(layout, arrived, "expert"), result);
  }

  ValueId pack_back(const DispatchedRows& dispatched, ValueId expert_out) final {
    return add_up(dispatched.at_experts, expert_out, -1, "expert_rows");
  }

  ValueId unpack_back(const DispatchedRows& dispatched, ValueId arrived) final {
    return add_up(dispatched.sent.map, arrived, dispatched.probs_TK, "moe_out");
  }

 protected:
  /// Of this rank's rows before the exchange.
  virtual RouteMapSpec sent_layout() const { return source_layout(num_tokens_); }

  int64_t num_tokens_ = 0;  ///< of this rank, once they are packed
};

}  // namespace tessera
