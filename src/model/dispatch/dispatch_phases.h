#pragma once

#include <memory>
#include <string>

#include "model/dispatch/dispatchers.h"

namespace tessera {

/// Tokens or rows on their way from one phase to the next.
struct RowSet {
  ValueId rows = -1;        ///< A [T or R, H]
  ValueId probs = -1;       ///< F32 [T, K] of tokens, [R] of rows; -1 where they stay
  ValueId expert_idx = -1;  ///< I32 [T, K] or [R]; -1 where the order of the rows says it
  ValueId counts = -1;      ///< I64 [E]: rows of each expert, where they stand by expert
};

/// The phases of one kind of dispatcher, each a few operators that are added to a program; no
/// communication but in exchange() and exchange_back(). Dispatch is pack, exchange, unpack; combine
/// is pack_back, exchange_back, unpack_back. What one finds out and a later one needs goes into
/// DispatchedRows.
class DispatchPhases {
 public:
  DispatchPhases(Program& program, const DispatchSpec& spec) : program_(program), spec_(spec) {}
  virtual ~DispatchPhases() = default;
  DispatchPhases(const DispatchPhases&) = delete;
  DispatchPhases& operator=(const DispatchPhases&) = delete;

  /// Orders this rank's tokens for the exchange.
  virtual RowSet pack(const RowSet& tokens, DispatchedRows& result) = 0;
  virtual RowSet exchange(const RowSet& packed, DispatchedRows& result) = 0;
  /// Lays what arrived out by expert: rows, probabilities and offsets of the result.
  virtual void unpack(const RowSet& arrived, DispatchedRows& result) = 0;

  virtual ValueId pack_back(const DispatchedRows& dispatched, ValueId expert_out) = 0;
  virtual ValueId exchange_back(const DispatchedRows& dispatched, ValueId packed) = 0;
  /// Adds up each token's rows: "moe_out".
  virtual ValueId unpack_back(const DispatchedRows& dispatched, ValueId arrived) = 0;

 protected:
  /// A layout of `tokens` and the rows in it.
  struct LaidOut {
    RowMap map;
    RowSet rows;  ///< with counts
    ValueId offsets = -1;
    ValueId dropped = -1;
  };
  /// route_map and permutation; probabilities only where they enter before FC2. `stage` is what the
  /// names begin with.
  LaidOut lay_out(const RouteMapSpec& layout, const RowSet& tokens, const std::string& stage);
  /// Sets what the experts see. Assignments dropped earlier stay in `result`.
  static void deliver(const LaidOut& laid_out, DispatchedRows& result);
  /// The layout of this rank's own tokens by expert, which drops what exceeds a capacity of theirs.
  RouteMapSpec source_layout(int64_t num_tokens) const;
  /// The layout of what arrives here, dropped before where it must be: aligned, and padded.
  RouteMapSpec arrival_layout(RouteMapSpec layout, int64_t num_tokens) const;
  /// The rows of each assignment, added up where `map` has it; weighted where there are
  /// probabilities.
  ValueId add_up(const RowMap& map, ValueId rows, ValueId probs, const std::string& name);
  int64_t num_tokens(const RowSet& tokens) const { return program_.type(tokens.rows).shape[0]; }

  Program& program_;
  const DispatchSpec& spec_;
};

std::unique_ptr<DispatchPhases> make_all_to_all_phases(Program& program, const DispatchSpec& spec);
std::unique_ptr<DispatchPhases> make_bounded_phases(Program& program, const DispatchSpec& spec);
std::unique_ptr<DispatchPhases> make_all_gather_phases(Program& program, const DispatchSpec& spec);
/// Of exact sizes or of bounded ones; hierarchical where spec.by_node is given.
std::unique_ptr<DispatchPhases> make_deduplicated_phases(Program& program,
                                                         const DispatchSpec& spec);

}  // namespace tessera
