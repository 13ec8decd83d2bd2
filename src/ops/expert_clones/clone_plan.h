#pragma once

#include <string>

#include "ops/operator.h"

namespace tessera {

/// The experts of a group of P ranks, and the S *slots* that each rank has for clones of hot
/// experts of other ranks, seen from one rank. Rank p holds experts p · E/P and following; its
/// slots are number p · S and following of all P · S.
struct CloneSlots {
  int64_t num_experts = 1;
  int64_t num_ranks = 1;
  int64_t rank = 0;
  int64_t slots_per_rank = 1;

  int64_t num_local() const { return num_experts / num_ranks; }
  int64_t num_slots() const { return num_ranks * slots_per_rank; }
  int64_t home_of(int64_t expert) const { return expert / num_local(); }
  /// The most clones that there can be of one rank's experts.
  int64_t max_clones() const { return (num_ranks - 1) * slots_per_rank; }
  /// "experts=8 ranks=4 slots=1".
  std::string to_string() const;
};

// clang-format off
/// Which experts to clone, and who takes which tokens (ECHO: Megatron-Core MoE, section 4.3.7):
///   counts I64 [P · E], of each rank's tokens those of every expert, one rank after the other ->
///   slots  I64 [P · S]   the expert that each slot holds, -1: none; of a rank rising, empty ones last
///   begins I64 [P · S]   of this rank's tokens of that expert, in order, the first that goes to the slot
///   ends   I64 [P · S]   and the one behind the last
// clang-format on
/// The mean is ceil(all tokens / P). As long as a rank has more than 1/16 beyond it, the fullest
/// one gives what its largest expert has, at most what it has beyond the mean, to the emptiest rank
/// with a free slot, at most what that lacks. So a rank with clones never has more than the mean,
/// no other more than it would have without, and where slots suffice none more than 17/16 of the
/// mean. Ranks keep the tokens that they have of experts cloned to them; the rest goes to the
/// copies in the order of ranks, home first. Integers alone: all ranks find the same. No gradient;
/// never recomputed. The host is told the slots.
class ClonePlan final : public Operator {
 public:
  static constexpr std::string_view kName = "clone_plan";
  enum Input : int { kCounts };
  enum Output : int { kSlots, kBegins, kEnds };

  /// Throws InternalError where experts do not divide by ranks, or the rank is none of them.
  explicit ClonePlan(const CloneSlots& slots);
  const CloneSlots& slots() const { return slots_; }

  std::string_view name() const override { return kName; }
  std::string attributes() const override { return slots_.to_string(); }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& /*builder*/) const override {}
  bool recomputable() const override { return false; }

 private:
  CloneSlots slots_;
};

/// Assignments of tokens, taken apart by that plan:
///   (expert_idx I32 [T, K], row_of_TK I32 [T, K], offsets I64 [E + 1], slots, begins, ends) ->
///   (home_idx I32 [T, K], clone_idx I32 [T, K])
/// row_of_TK and offsets are route_map's, dropless and without padding: a token's place among those
/// of its expert. home_idx is the expert, -1 where the assignment goes to a clone, clone_idx the
/// slot, -1 where it does not. No gradient; never recomputed.
class CloneRoute final : public Operator {
 public:
  static constexpr std::string_view kName = "clone_route";
  enum Input : int { kExpertIdx, kRowOf, kOffsets, kSlots, kBegins, kEnds };
  enum Output : int { kHomeIdx, kCloneIdx };

  explicit CloneRoute(const CloneSlots& slots) : slots_(slots) {}
  const CloneSlots& slots() const { return slots_; }

  std::string_view name() const override { return kName; }
  std::string attributes() const override { return slots_.to_string(); }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& /*builder*/) const override {}
  bool recomputable() const override { return false; }

 private:
  CloneSlots slots_;
};

OperatorPtr make_clone_plan(const CloneSlots& slots);
OperatorPtr make_clone_route(const CloneSlots& slots);

/// The kernels of these and of clone_weights.h.
void add_expert_clones_cpu(KernelTable& table);
/// The same for GPUs, up to 1024 slots.
void add_expert_clones_cuda(KernelTable& table);

}  // namespace tessera
