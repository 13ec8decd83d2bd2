#pragma once

#include "ops/operator.h"

namespace tessera {

/// Decay and writing strength of each head of a gated delta rule (Gated Delta Networks: Yang et
/// al., 2024, section 3.4; the decay as Mamba-2 makes it): g = -exp(A_log) · softplus(a + dt_bias)
/// and beta = sigmoid(b). (a A [T,N], b A [T,N], A_log F32 [N], dt_bias F32 [N]) -> (g F32 [T,N],
/// beta F32 [T,N]).
class DeltaGates final : public Operator {
 public:
  static constexpr std::string_view kName = "delta_gates";
  enum Input : int { kA, kB, kLogDecay, kBias };
  enum Output : int { kDecay, kBeta };
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;
};

/// (a, b, A_log, dt_bias, grad of g, grad of beta) -> (grads of a and b A [T,N]; grads of A_log and
/// dt_bias F32 [N], accumulated in the order of the tokens).
class DeltaGatesBackward final : public Operator {
 public:
  static constexpr std::string_view kName = "delta_gates_backward";
  enum Input : int { kA, kB, kLogDecay, kBias, kGradDecay, kGradBeta };
  enum Output : int { kGradA, kGradB, kGradLogDecay, kGradBias };
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  bool accumulates(int output) const override {
    return output == kGradLogDecay || output == kGradBias;
  }
};

OperatorPtr make_delta_gates();
void add_delta_gates_cpu(KernelTable& table);
void add_delta_gates_cuda(KernelTable& table);

}  // namespace tessera
