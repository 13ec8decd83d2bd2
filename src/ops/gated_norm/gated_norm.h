#pragma once

#include "ops/operator.h"

namespace tessera {

/// What a gated norm multiplies by.
enum class NormGate {
  kSilu,     ///< Gated DeltaNet
  kSigmoid,  ///< Kimi Delta Attention
};

/// y = RMSNorm(x) · weight · gate(z), head by head: the norm and output gate behind a gated delta
/// rule (Gated Delta Networks: Yang et al., 2024, figure 1). (x A [T,N·D], z A [T,N·D], weight F32
/// [D]) -> y A [T,N·D].
class GatedNorm final : public Operator {
 public:
  static constexpr std::string_view kName = "gated_norm";
  enum Input : int { kX, kZ, kWeight };
  enum Output : int { kY };

  /// Throws UserError unless eps >= 0.
  explicit GatedNorm(double eps, NormGate gate = NormGate::kSilu);
  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;
  float eps() const { return static_cast<float>(eps_); }
  NormGate gate() const { return gate_; }

 private:
  double eps_;
  NormGate gate_;
};

/// (x, z, weight, grad of y A [T,N·D]) -> (grads of x and z A [T,N·D], grad of weight F32 [D],
/// accumulated in a fixed order). Statistics are computed again.
class GatedNormBackward final : public Operator {
 public:
  static constexpr std::string_view kName = "gated_norm_backward";
  enum Input : int { kX, kZ, kWeight, kGrad };
  enum Output : int { kGradX, kGradZ, kGradWeight };

  explicit GatedNormBackward(double eps, NormGate gate = NormGate::kSilu)
      : eps_(eps), gate_(gate) {}
  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  bool accumulates(int output) const override { return output == kGradWeight; }
  float eps() const { return static_cast<float>(eps_); }
  NormGate gate() const { return gate_; }

 private:
  double eps_;
  NormGate gate_;
};

OperatorPtr make_gated_norm(double eps, NormGate gate = NormGate::kSilu);
void add_gated_norm_cpu(KernelTable& table);
void add_gated_norm_cuda(KernelTable& table);

}  // namespace tessera
