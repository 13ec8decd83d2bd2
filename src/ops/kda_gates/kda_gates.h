#pragma once

#include "ops/operator.h"

namespace tessera {

/// Decays and writing strength of each head of Kimi Delta Attention (Kimi Linear: Kimi Team, 2025,
/// section 4; the decay as Mamba-2 makes it): g = -exp(A_log) · softplus(a + dt_bias) for each of D
/// elements of a key, and beta = sigmoid(b). (a A [T,N·D], b A [T,N], A_log F32 [N], dt_bias F32
/// [N·D]) -> (g F32 [T,N·D], beta F32 [T,N]).
class KdaGates final : public Operator {
 public:
  static constexpr std::string_view kName = "kda_gates";
  enum Input : int { kA, kB, kLogDecay, kBias };
  enum Output : int { kDecay, kBeta };
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;
};

/// (a, b, A_log, dt_bias, grad of g, grad of beta) -> (grads of a A [T,N·D] and b A [T,N]; grads of
/// A_log F32 [N] and dt_bias F32 [N·D], accumulated in a fixed order).
class KdaGatesBackward final : public Operator {
 public:
  static constexpr std::string_view kName = "kda_gates_backward";
  enum Input : int { kA, kB, kLogDecay, kBias, kGradDecay, kGradBeta };
  enum Output : int { kGradA, kGradB, kGradLogDecay, kGradBias };
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  bool accumulates(int output) const override {
    return output == kGradLogDecay || output == kGradBias;
  }
};

OperatorPtr make_kda_gates();
void add_kda_gates_cpu(KernelTable& table);
void add_kda_gates_cuda(KernelTable& table);

}  // namespace tessera
