#pragma once

#include "ops/operator.h"

namespace tessera {

/// Learnt factors of the experts on their probabilities, as Gemma 4's router has them behind the
/// choice: (probs F32 [T, K], expert_idx I32 [T, K], scale F32 [E]) -> scaled F32 [T, K]. What has
/// no expert (-1) stays as it is.
class ExpertScale final : public Operator {
 public:
  static constexpr std::string_view kName = "expert_scale";
  enum Input : int { kProbs, kExpertIdx, kScale };
  enum Output : int { kScaled };

  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;
};

/// (probs F32 [T, K], expert_idx I32 [T, K], scale F32 [E], grad of scaled F32 [T, K]) ->
/// (dprobs F32 [T, K], dscale F32 [E], added to in an order that sizes alone give).
class ExpertScaleBackward final : public Operator {
 public:
  static constexpr std::string_view kName = "expert_scale_backward";
  enum Input : int { kProbs, kExpertIdx, kScale, kGrad };
  enum Output : int { kGradProbs, kGradScale };

  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  bool accumulates(int output) const override { return output == kGradScale; }
};

OperatorPtr make_expert_scale();
void add_expert_scale_cpu(KernelTable& table);
void add_expert_scale_cuda(KernelTable& table);

}  // namespace tessera
