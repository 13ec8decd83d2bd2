#pragma once

#include "ops/operator.h"

namespace tessera {

/// The second half of the cross-entropy over a vocabulary that is spread over P ranks: from the
/// statistics of vocab_lse (ops/linear_cross_entropy) over every rank's part, for a rank's own
/// tokens: (lse F32 [P·T], label_logit F32 [P·T], labels I32 [T], scale F32 [1], of weighted
/// ones token_weights F32 [T]) -> (loss F32 [1], token_loss F32 [T]). Element p·T + t is that of
/// part p and token t, as an all-to-all of each rank's [P·T] leaves them; shapes [P, T] are taken
/// too.
///
/// token_loss = log Σ_p exp(lse_p) - Σ_p label_logit_p, 0 where the label is -100 (ignored); loss =
/// scale · Σ token_weight · token_loss, summed in double from the first token to the last. Of the
/// lse of parts, some may be -inf, but not all. A gradient can reach the loss only.
class VocabLoss final : public Operator {
 public:
  static constexpr std::string_view kName = "vocab_loss";
  enum Input : int { kLse, kLabelLogit, kLabels, kScale, kTokenWeights };
  enum Output : int { kLoss, kTokenLoss };

  /// Throws UserError where `num_parts` is below 1.
  explicit VocabLoss(int64_t num_parts, bool weighted = false);
  int64_t num_parts() const { return num_parts_; }
  bool weighted() const { return weighted_; }

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;

 private:
  int64_t num_parts_;
  bool weighted_;
};

/// (lse, label_logit, labels, scale, grad_loss F32 [1], [token_weights]) -> the gradients of lse
/// and label_logit, in their shapes; 0 for ignored tokens.
class VocabLossBackward final : public Operator {
 public:
  static constexpr std::string_view kName = "vocab_loss_backward";
  enum Input : int { kLse, kLabelLogit, kLabels, kScale, kGradLoss, kTokenWeights };
  enum Output : int { kGradLse, kGradLabelLogit };

  explicit VocabLossBackward(int64_t num_parts, bool weighted = false)
      : num_parts_(num_parts), weighted_(weighted) {}
  int64_t num_parts() const { return num_parts_; }
  bool weighted() const { return weighted_; }

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;

 private:
  int64_t num_parts_;
  bool weighted_;
};

OperatorPtr make_vocab_loss(int64_t num_parts, bool weighted = false);
void add_vocab_loss_cpu(KernelTable& table);
void add_vocab_loss_cuda(KernelTable& table);

}  // namespace tessera
