#pragma once

#include <string>

#include "ops/operator.h"

namespace tessera {

struct TopPSpec {
  int64_t num_experts = 1;
  double share = 1.0;           ///< p, above 0
  bool normalize = false;       ///< divide what is kept by its sum (+ 1e-20)
  double scaling_factor = 1.0;  ///< multiplies the probabilities at last
};

/// Of the experts that a token has chosen, best first, keeps the fewest whose scores add up to at
/// least p, at least one and at most all K (Harder Tasks Need More Experts: Huang et al., 2024,
/// section 3.2):
///   (probs F32 [T, K], expert_idx I32 [T, K]) ->
///   probs F32 [T, K]       0 where an expert was given up
///   expert_idx I32 [T, K]  -1 there
///   counts F32 [E]         tokens that keep each expert
/// The scores are shares of 1 over all experts, as a softmax before the choice gives them. Sums are
/// F32 and in order of k. Their gradient reaches probs; which experts are kept is a constant to it.
/// Never recomputed.
class TopP final : public Operator {
 public:
  static constexpr std::string_view kName = "top_p";
  enum Input : int { kProbs, kExpertIdx };
  enum Output : int { kKeptProbs, kKeptIdx, kCounts };

  /// Throws UserError for an impossible combination.
  explicit TopP(const TopPSpec& spec);
  const TopPSpec& spec() const { return spec_; }

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;
  bool recomputable() const override { return false; }

 private:
  TopPSpec spec_;
};

/// (probs F32 [T, K], kept_idx I32 [T, K], grad of the kept probs F32 [T, K]) -> dprobs F32 [T, K].
class TopPBackward final : public Operator {
 public:
  static constexpr std::string_view kName = "top_p_backward";
  enum Input : int { kProbs, kKeptIdx, kGrad };
  enum Output : int { kGradProbs };

  explicit TopPBackward(const TopPSpec& spec) : spec_(spec) {}
  const TopPSpec& spec() const { return spec_; }

  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;

 private:
  TopPSpec spec_;
};

OperatorPtr make_top_p(const TopPSpec& spec);
void add_top_p_cpu(KernelTable& table);
void add_top_p_cuda(KernelTable& table);

}  // namespace tessera
