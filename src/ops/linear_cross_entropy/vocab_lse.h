#pragma once

#include "ops/linear_cross_entropy/linear_cross_entropy.h"

namespace tessera {

/// The part of the vocabulary that a rank's weight holds, and how the product is cut and its logits
/// are capped.
struct VocabLseSpec {
  int64_t first_row = 0;
  int64_t vocab_size = 0;  ///< of the whole vocabulary
  CrossEntropySpec cut;
};

/// The first half of the cross-entropy over a vocabulary that is spread over ranks: each rank finds
/// the statistics of all tokens over its rows, once. An exchange gives each rank all statistics of
/// its own tokens, from which vocab_loss (ops/vocab_loss) makes the loss.
class VocabLseOperator : public Operator {
 public:
  /// Throws UserError where a size is impossible.
  explicit VocabLseOperator(const VocabLseSpec& spec);
  const VocabLseSpec& spec() const { return spec_; }
  std::string attributes() const override;

 protected:
  /// The first inputs of both.
  enum Input : int { kX = HeadOperands::kX, kWeight, kLabels };

  /// Checks x A [T, H], weight A [V_l, H] and labels I32 [T], the first three inputs, and the last,
  /// which `num_inputs` does not count: of biased ones the bias F32 [V_l].
  void check_inputs(std::span<const ValueType> inputs, size_t num_inputs) const;
  Cost product_cost(int num_products, std::span<const ValueType> inputs,
                    std::span<const ValueType> outputs) const;

 private:
  VocabLseSpec spec_;
};

/// (x A [T, H], weight A [V_l, H], labels I32 [T], [bias F32 [V_l]]) -> (lse F32 [T], label_logit
/// F32 [T]). The weight has rows first_row and following of the whole one; V_l may be 0. lse = log
/// Σ exp(x · weightᵀ + bias) over these rows, -inf where there are none; label_logit = the logit of
/// the token's label where that is among these rows, else 0. The kernel throws UserError for a
/// label outside the whole vocabulary that is not kIgnoredLabel. Logits are made in chunks, as in
/// linear_cross_entropy.
class VocabLse final : public VocabLseOperator {
 public:
  static constexpr std::string_view kName = "vocab_lse";
  enum Input : int { kX, kWeight, kLabels, kBias };
  enum Output : int { kLse, kLabelLogit };
  using VocabLseOperator::VocabLseOperator;
  OperandSet<Input> input_set() const {
    return OperandSet<Input>{kX, kWeight, kLabels}.add(kBias, spec().cut.biased);
  }
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& builder) const override;
};

/// (x, weight, labels, lse F32 [T], grad_lse F32 [T], grad_label_logit F32 [T], [bias]) -> (dx A
/// [T, H], dweight F32 [V_l, H] added to, [dbias F32 [V_l] added to]). The logits are computed
/// again; their gradients are rounded to A for the two products.
class VocabLseBackward final : public VocabLseOperator {
 public:
  static constexpr std::string_view kName = "vocab_lse_backward";
  enum Input : int { kX, kWeight, kLabels, kForwardLse, kGradLse, kGradLabelLogit, kBias };
  enum Output : int { kGradX, kGradWeight, kGradBias };
  using VocabLseOperator::VocabLseOperator;
  OperandSet<Input> input_set() const {
    return OperandSet<Input>{kX, kWeight, kLabels, kForwardLse, kGradLse, kGradLabelLogit}.add(
        kBias, spec().cut.biased);
  }
  OperandSet<Output> output_set() const {
    return OperandSet<Output>{kGradX, kGradWeight}.add(kGradBias, spec().cut.biased);
  }
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  bool accumulates(int output) const override { return output >= kGradWeight; }
};

OperatorPtr make_vocab_lse(const VocabLseSpec& spec);
void add_vocab_lse_cpu(KernelTable& table);

}  // namespace tessera
