#pragma once

#include "ops/operator.h"
#include "ops/sigmoid_gate/gate_function.h"

namespace tessera {

struct GateSpec {
  GateFunction function = GateFunction::kSigmoid;
  /// Logits are of heads, or of elements, which ranks may share; false: of whole rows or elements.
  bool of_heads = false;
};

/// y · gate(logit), row by row, the gate of a shared expert (Qwen2-MoE), element by element, that
/// of attention (Qwen3-Next), or head by head (Laguna): logit g is of the elements from g · H / G
/// on. (y A [T,H], logit A [T,G], where G divides H) -> A [T,H]. With GateFunction::kIdentity the
/// logits are factors of rows, F32 [T].
class SigmoidGate final : public Operator {
 public:
  static constexpr std::string_view kName = "sigmoid_gate";
  enum Input : int { kX, kLogit };
  enum Output : int { kY };
  explicit SigmoidGate(GateSpec spec = {}) : spec_(spec) {}
  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  const GateSpec& spec() const { return spec_; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;

 private:
  GateSpec spec_;
};

/// (y, logit, grad_out A [T,H]) -> (grad_y A [T,H], grad_logit as logit).
class SigmoidGateBackward final : public Operator {
 public:
  static constexpr std::string_view kName = "sigmoid_gate_backward";
  enum Input : int { kX, kLogit, kGrad };
  enum Output : int { kGradX, kGradLogit };
  explicit SigmoidGateBackward(GateSpec spec = {}) : spec_(spec) {}
  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  const GateSpec& spec() const { return spec_; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;

 private:
  GateSpec spec_;
};

OperatorPtr make_sigmoid_gate(GateSpec spec = {});
void add_sigmoid_gate_cpu(KernelTable& table);
void add_sigmoid_gate_cuda(KernelTable& table);

}  // namespace tessera
