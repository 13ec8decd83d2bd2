#pragma once

#include <string>

#include "ops/operator.h"

namespace tessera {

struct ZeroExpertsSpec {
  int64_t num_experts = 1;   ///< E: those that compute
  int64_t zero_experts = 1;  ///< Z: numbers from E on, each of which gives the token itself
};

/// The experts that compute nothing (zero-computation experts: MoE++, Jin et al., 2024,
/// section 3.1, of which these are the copy experts; LongCat-Flash, 2025, section 2.1), and the
/// choices that are left for dispatch:
///   (x A [T, H], probs F32 [T, K], expert_idx I32 [T, K]) ->
///   y A [T, H]           x times the sum of the token's probabilities of such experts
///   routed_idx I32 [T, K]  the others, -1 in place of those; -1 stays -1
/// Sums are F32 and in order of k, the product is rounded once. The gradient of y reaches x and
/// probs.
class ZeroExperts final : public Operator {
 public:
  static constexpr std::string_view kName = "zero_experts";
  enum Input : int { kX, kProbs, kExpertIdx };
  enum Output : int { kY, kRoutedIdx };

  /// Throws UserError for counts below 1.
  explicit ZeroExperts(const ZeroExpertsSpec& spec);
  const ZeroExpertsSpec& spec() const { return spec_; }

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& builder) const override;
  bool recomputable() const override { return false; }

 private:
  ZeroExpertsSpec spec_;
};

/// (x A [T, H], probs F32 [T, K], expert_idx I32 [T, K], grad of y A [T, H]) ->
/// (dx A [T, H], dprobs F32 [T, K], 0 where an expert computes).
class ZeroExpertsBackward final : public Operator {
 public:
  static constexpr std::string_view kName = "zero_experts_backward";
  enum Input : int { kX, kProbs, kExpertIdx, kGrad };
  enum Output : int { kGradX, kGradProbs };

  explicit ZeroExpertsBackward(const ZeroExpertsSpec& spec) : spec_(spec) {}
  const ZeroExpertsSpec& spec() const { return spec_; }

  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;

 private:
  ZeroExpertsSpec spec_;
};

OperatorPtr make_zero_experts(const ZeroExpertsSpec& spec);
void add_zero_experts_cpu(KernelTable& table);
void add_zero_experts_cuda(KernelTable& table);

}  // namespace tessera
