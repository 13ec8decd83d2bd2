#pragma once

#include "ops/operator.h"

namespace tessera {

/// x + bias for every row: (x A [T, H], bias F32 [H]) -> A [T, H], A F32 or BF16, rounded once. Dim
/// T may be ragged. For products whose bias cannot be added inside them: those that are summed over
/// ranks first.
class AddBias final : public Operator {
 public:
  static constexpr std::string_view kName = "add_bias";
  enum Input : int { kX, kBias };
  enum Output : int { kY };
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& builder) const override;
};

/// (grad A [T, H]) -> F32 [H], accumulated in a fixed order.
class AddBiasGrad final : public Operator {
 public:
  static constexpr std::string_view kName = "add_bias_grad";
  enum Input : int { kGrad };
  enum Output : int { kGradBias };
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  bool accumulates(int /*output*/) const override { return true; }
};

OperatorPtr make_add_bias();
void add_add_bias_cpu(KernelTable& table);
void add_add_bias_cuda(KernelTable& table);

}  // namespace tessera
