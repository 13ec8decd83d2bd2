#pragma once

#include "ops/operator.h"

namespace tessera {

/// a + b for values of one type and shape, ragged or not: residual connections and sums of
/// gradients. BF16 operands are added in F32 and rounded once.
class Add final : public Operator {
 public:
  static constexpr std::string_view kName = "add";
  enum Input : int { kA, kB };
  enum Output : int { kSum };
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& builder) const override;
};

OperatorPtr make_add();
void add_add_cpu(KernelTable& table);
void add_add_cuda(KernelTable& table);

}  // namespace tessera
