#pragma once

#include "ops/operator.h"

namespace tessera {

/// x times a number that is a value of the program and no weight that is trained, as the layers of
/// Gemma 4 have one: (x A [..], factor F32 [1]) -> y A [..]. Computed in F32 and rounded once. The
/// factor has no gradient.
class ScaleBy final : public Operator {
 public:
  static constexpr std::string_view kName = "scale_by";
  enum Input : int { kX, kFactor };
  enum Output : int { kY };

  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& builder) const override;
};

OperatorPtr make_scale_by();
void add_scale_by_cpu(KernelTable& table);
void add_scale_by_cuda(KernelTable& table);

}  // namespace tessera
