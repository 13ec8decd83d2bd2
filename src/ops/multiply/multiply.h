#pragma once

#include "ops/operator.h"

namespace tessera {

/// a · b, element by element, of two values A of one type and shape: the gates of a gated
/// convolution (LFM2). Computed in F32 and rounded once. As a function of partial sums it is one of
/// a.
class Multiply final : public Operator {
 public:
  static constexpr std::string_view kName = "multiply";
  enum Input : int { kA, kB };
  enum Output : int { kY };
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& builder) const override;
};

OperatorPtr make_multiply();
void add_multiply_cpu(KernelTable& table);
void add_multiply_cuda(KernelTable& table);

}  // namespace tessera
