#pragma once

#include "ops/operator.h"

namespace tessera {

/// y · sigmoid(logit), row by row, the gate of a shared expert (Qwen2-MoE), or element by element,
/// that of attention (Qwen3-Next). (y A [T,H], logit A [T,1] or A [T,H]) -> A [T,H].
class SigmoidGate final : public Operator {
 public:
  static constexpr std::string_view kName = "sigmoid_gate";
  enum Input : int { kX, kLogit };
  enum Output : int { kY };
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;
};

/// (y, logit, grad_out A [T,H]) -> (grad_y A [T,H], grad_logit as logit).
class SigmoidGateBackward final : public Operator {
 public:
  static constexpr std::string_view kName = "sigmoid_gate_backward";
  enum Input : int { kX, kLogit, kGrad };
  enum Output : int { kGradX, kGradLogit };
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
};

OperatorPtr make_sigmoid_gate();
void add_sigmoid_gate_cpu(KernelTable& table);
void add_sigmoid_gate_cuda(KernelTable& table);

}  // namespace tessera
