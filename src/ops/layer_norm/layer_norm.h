#pragma once

#include "ops/addend.h"

namespace tessera {

/// LayerNorm with weight and bias: y = (x - mean(x)) / sqrt(var(x) + eps) · weight + bias over each
/// row (Ba et al., "Layer normalization", 2016). (x A [T, D], weight F32 [D], bias F32 [D]) -> (y A
/// [T, D]). Computed in F32 and rounded once.
class LayerNorm final : public Operator {
 public:
  static constexpr std::string_view kName = "layer_norm";
  enum Input : int { kX, kWeight, kBias };
  enum Output : int { kY };

  /// Throws UserError unless eps >= 0.
  explicit LayerNorm(double eps);

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;
  float eps() const { return static_cast<float>(eps_); }

 private:
  double eps_;
};

/// (x A [T, D], weight F32 [D], grad of y A [T, D], and with addend: A [T, D]) -> (grad of x, plus
/// the addend, A [T, D], grad of weight F32 [D], grad of bias F32 [D], both accumulated in a fixed
/// order). Means and deviations of rows are computed again from x.
class LayerNormBackward final : public Operator, public TakesAddend {
 public:
  static constexpr std::string_view kName = "layer_norm_backward";
  enum Input : int { kX, kWeight, kGrad, kAddend };
  enum Output : int { kGradX, kGradWeight, kGradBias };

  explicit LayerNormBackward(double eps, bool addend = false) : eps_(eps), addend_(addend) {}

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  bool accumulates(int output) const override { return output != kGradX; }
  OperatorPtr with_addend(std::span<const ValueType> inputs) const override;
  bool addend() const { return addend_; }
  float eps() const { return static_cast<float>(eps_); }

 private:
  double eps_;
  bool addend_;
};

OperatorPtr make_layer_norm(double eps);
void add_layer_norm_cpu(KernelTable& table);
void add_layer_norm_cuda(KernelTable& table);

}  // namespace tessera
