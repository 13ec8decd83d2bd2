#pragma once

#include "ops/collective/collective.h"
#include "ops/expert_clones/clone_plan.h"

namespace tessera {

/// Clones of experts' weights, made and undone (ECHO's expert dispatch and expert gradient
/// dispatch: Megatron-Core MoE, section 4.3.7). The experts of the group's ranks are all of one
/// size: blocks of B rows, of whatever shape.

/// What the clones in this rank's slots are copies of: (weight A [E/P · B, ...], slots I64 [P · S])
/// -> A [S · B, ...]. Blocks of empty slots are undefined. `slots` is ClonePlan's, the same on all
/// ranks. Each rank sends a block to every slot that holds one of its experts, packed in scratch
/// memory first; where there are no clones nobody sends anything. The gradient goes the other way:
/// ReturnClones, then AddClones.
class CloneWeights final : public CollectiveOperator {
 public:
  static constexpr std::string_view kName = "clone_weights";
  enum Input : int { kWeight, kSlots };

  CloneWeights(CommunicatorPtr comm, const CloneSlots& slots);
  const CloneSlots& slots() const { return slots_; }

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;

 private:
  CloneSlots slots_;
};

/// The gradients of clones back to where their experts are: (grad F32 [S · B, ...], slots I64 [P ·
/// S])
/// -> F32 [(P - 1) · S · B, ...]: one block after the other those of the slots that hold this
/// rank's experts, in the order of slots; what follows is undefined.
class ReturnClones final : public CollectiveOperator {
 public:
  static constexpr std::string_view kName = "return_clones";
  enum Input : int { kGrad, kSlots };

  ReturnClones(CommunicatorPtr comm, const CloneSlots& slots);
  const CloneSlots& slots() const { return slots_; }

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;

 private:
  CloneSlots slots_;
};

/// Their sum: (returned F32 [(P - 1) · S · B, ...], slots I64 [P · S]) -> F32 [E/P · B, ...],
/// accumulated: to each expert's block those of its clones, in the order of slots. Experts without
/// clones stay as they were.
class AddClones final : public Operator {
 public:
  static constexpr std::string_view kName = "add_clones";
  enum Input : int { kReturned, kSlots };
  enum Output : int { kGradWeight };

  explicit AddClones(const CloneSlots& slots) : slots_(slots) {}
  const CloneSlots& slots() const { return slots_; }

  std::string_view name() const override { return kName; }
  std::string attributes() const override { return slots_.to_string(); }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  bool accumulates(int output) const override { return output == kGradWeight; }

 private:
  CloneSlots slots_;
};

/// Throws InternalError where the group is not that of the slots.
OperatorPtr make_clone_weights(CommunicatorPtr comm, const CloneSlots& slots);

}  // namespace tessera
