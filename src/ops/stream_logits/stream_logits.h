#pragma once

#include <string>

#include "ops/addend.h"

namespace tessera {

/// What hyper-connections weigh residual streams by, before it is scaled (mHC: Xie et al., 2026,
/// section 4.2; DeepSeek-V4, section 2.2): a token's streams as one row, normed without a weight,
/// times a matrix: (x A [T, W], weight F32 [M, W]) -> (logits F32 [T, M], rstd F32 [T]) with
/// rstd = 1 / sqrt(mean x² + eps) and logits = rstd · x · weightᵀ. x is widened, not rounded, and
/// a token's logits do not depend on the tokens beside it.
class StreamLogits final : public Operator {
 public:
  static constexpr std::string_view kName = "stream_logits";
  enum Input : int { kX, kWeight };
  enum Output : int { kLogits, kRstd };

  /// Throws UserError for an eps below 0.
  explicit StreamLogits(double eps);
  float eps() const { return static_cast<float>(eps_); }

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& builder) const override;

 private:
  double eps_;
};

/// (x, weight, logits, rstd, grad of logits F32 [T, M], [addend A [T, W]]) -> (dx A [T, W], plus
/// the addend; dweight F32 [M, W], accumulated in an order that sizes give).
class StreamLogitsBackward final : public Operator, public TakesAddend {
 public:
  static constexpr std::string_view kName = "stream_logits_backward";
  enum Input : int { kX, kWeight, kLogits, kRstd, kGrad, kAddend };
  enum Output : int { kGradX, kGradWeight };

  explicit StreamLogitsBackward(bool addend = false) : addend_(addend) {}
  bool addend() const { return addend_; }

  std::string_view name() const override { return kName; }
  std::string attributes() const override { return addend_ ? "addend" : ""; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  bool accumulates(int output) const override { return output == kGradWeight; }
  OperatorPtr with_addend(std::span<const ValueType> inputs) const override;

 private:
  bool addend_;
};

OperatorPtr make_stream_logits(double eps);
void add_stream_logits_cpu(KernelTable& table);
void add_stream_logits_cuda(KernelTable& table);

}  // namespace tessera
