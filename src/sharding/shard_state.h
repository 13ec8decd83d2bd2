#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tessera {

/// The axes along which the ranks of one pipeline stage differ, as values see them. TP and CP are
/// two axes each, since weights and tokens may differ along a part of them alone; neighbours differ
/// along the first one of each pair.
enum class RankAxis : uint8_t {
  kTpCopies,  ///< neighbours along TP that hold the same key-value heads
  kTpParts,   ///< the rest of TP
  kHeads,     ///< the part of CP where heads are exchanged for tokens
  kRing,      ///< the rest of CP
  kDp,
  kEtp,
  kEp,       ///< where tokens go node by node, the part within one
  kEpNodes,  ///< the rest of EP
  kEdp,
};
inline constexpr int kNumRankAxes = 9;
/// "tp copies", "tp", "cp heads", "cp ring", "dp", "etp", "ep", "ep nodes", "edp".
std::string_view rank_axis_name(RankAxis axis);

/// A stage's ranks are factored twice (Parallel Folding, section 3.2).
enum class Factoring : uint8_t { kDense, kExperts };
inline constexpr std::array kFactorings = {Factoring::kDense, Factoring::kExperts};
constexpr bool is_ep(RankAxis axis) {
  return axis == RankAxis::kEp || axis == RankAxis::kEpNodes;
}
constexpr Factoring factoring_of(RankAxis axis) {
  return axis < RankAxis::kEtp ? Factoring::kDense : Factoring::kExperts;
}

/// What the values of the ranks along one axis are to one another. The kinds are those of typed
/// SPMD programs (Yang, "spmd_types", 2026): replicated, sharded, partial, varying.
struct ShardState {
  enum class Kind : uint8_t {
    kReplicated,  ///< the same on all
    kSharded,     ///< the parts of one value, along a dim
    kByExpert,    ///< the same, each having what belongs to its own experts
    kPartial,     ///< summands of one value
    kVarying,     ///< each has its own, by design: counts, maps, a micro-batch's statistics
  };
  Kind kind = Kind::kReplicated;
  int8_t dim = 0;  ///< of kSharded and kByExpert

  static ShardState replicated() { return {}; }
  static ShardState sharded(int dim) { return {Kind::kSharded, static_cast<int8_t>(dim)}; }
  static ShardState by_expert(int dim) { return {Kind::kByExpert, static_cast<int8_t>(dim)}; }
  static ShardState partial() { return {Kind::kPartial}; }
  static ShardState varying() { return {Kind::kVarying}; }

  bool is(Kind other) const { return kind == other; }
  bool is_cut() const { return kind == Kind::kSharded || kind == Kind::kByExpert; }
  /// That of the gradient: what is the same on all ranks has a gradient that their sum is, and the
  /// reverse; parts have parts.
  ShardState dual() const;
  /// "R", "S0", "E0", "P", "V".
  std::string to_string() const;
  bool operator==(const ShardState&) const = default;
};

/// By RankAxis; along an axis of one rank all is replicated.
using ShardStates = std::array<ShardState, kNumRankAxes>;

/// How a value is spread over a stage's ranks. It need not be of both factorings: tokens that are
/// gathered over TP are nothing that could be said along EP.
struct Sharding {
  ShardStates states = {};
  bool dense = false;    ///< whether the states of TP, CP and DP are known
  bool experts = false;  ///< likewise of ETP, EP and EDP

  bool is_known(Factoring factoring) const {
    return factoring == Factoring::kDense ? dense : experts;
  }
  void set_known(Factoring factoring) { (factoring == Factoring::kDense ? dense : experts) = true; }
  bool is_known() const { return dense || experts; }
  const ShardState& along(RankAxis axis) const { return states[static_cast<size_t>(axis)]; }
  ShardState& along(RankAxis axis) { return states[static_cast<size_t>(axis)]; }
  /// That of the gradient.
  Sharding dual() const;
};

}  // namespace tessera
