#pragma once

#include <string>

#include "ops/operator.h"

namespace tessera {

/// Slots of `slot_rows` rows each: the rows of `num_experts` experts, one expert after the other,
/// and padding behind them (RouteMapSpec::slot_experts makes them).
struct SlotExpertsSpec {
  int64_t num_experts = 1;  ///< N
  int64_t slot_rows = 0;    ///< B
};

/// Says whose the rows of slots are: (counts I64 [S · N], how many rows of each expert stand in
/// each slot, slot by slot) -> I32 [S · B]: the expert of each row, -1 for padding. A pure
/// function; no gradient; never recomputed. Throws InternalError where a count is negative, or a
/// slot's rows are more than it has.
class SlotExperts final : public Operator {
 public:
  static constexpr std::string_view kName = "slot_experts";
  enum Input : int { kCounts };
  enum Output : int { kExpertIdx };

  explicit SlotExperts(const SlotExpertsSpec& spec);
  const SlotExpertsSpec& spec() const { return spec_; }

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& /*builder*/) const override {}
  bool recomputable() const override { return false; }

 private:
  SlotExpertsSpec spec_;
};

OperatorPtr make_slot_experts(const SlotExpertsSpec& spec);

void add_slot_experts_cpu(KernelTable& table);
/// Up to 1024 experts.
void add_slot_experts_cuda(KernelTable& table);

}  // namespace tessera
