#pragma once

#include "ops/addend.h"

namespace tessera {

/// y = x · rstd · weight, rstd = 1 / sqrt(mean(x²) + eps) over the last dim (Zhang and Sennrich,
/// "Root mean square layer normalization", 2019): (x A [.., H], weight F32 [H]) -> (y A [.., H],
/// rstd F32 [..]). With a weight [D], D a divisor of H, each of the H/D heads of a row is
/// normalised by itself, all with the one weight, and rstd is F32 [.., H/D]. Any dim but the last
/// may be ragged.
class RmsNorm final : public Operator {
 public:
  static constexpr std::string_view kName = "rmsnorm";
  enum Input : int { kX, kWeight };
  enum Output : int { kY, kRstd };

  /// Throws UserError unless eps >= 0.
  explicit RmsNorm(double eps);

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;
  float eps() const { return static_cast<float>(eps_); }

 private:
  double eps_;
};

/// (x A [.., H], weight F32 [D], rstd as above, grad of y A [.., H], and with addend: A [.., H]) ->
/// (grad of x, plus the addend, A [.., H], grad of weight F32 [D], accumulated in a fixed order).
class RmsNormBackward final : public Operator, public TakesAddend {
 public:
  static constexpr std::string_view kName = "rmsnorm_backward";
  enum Input : int { kX, kWeight, kForwardRstd, kGrad, kAddend };
  enum Output : int { kGradX, kGradWeight };

  explicit RmsNormBackward(bool addend = false) : addend_(addend) {}

  std::string_view name() const override { return kName; }
  std::string attributes() const override { return addend_ ? "addend" : ""; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  bool accumulates(int output) const override { return output == kGradWeight; }
  OperatorPtr with_addend(std::span<const ValueType> inputs) const override;
  bool addend() const { return addend_; }

 private:
  bool addend_;
};

OperatorPtr make_rmsnorm(double eps);
void add_rmsnorm_cpu(KernelTable& table);
void add_rmsnorm_cuda(KernelTable& table);

}  // namespace tessera
