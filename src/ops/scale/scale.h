#pragma once

#include "ops/addend.h"

namespace tessera {

/// factor · x, or with an addend factor · x + addend, for values of one type and shape, ragged or
/// not: the multipliers of hidden states (ModelConfig::residual_multiplier). Computed in F32 and
/// rounded once.
class Scale final : public Operator, public TakesAddend {
 public:
  static constexpr std::string_view kName = "scale";
  enum Input : int { kX, kAddend };
  enum Output : int { kY };

  /// Throws UserError for a factor that is not finite.
  explicit Scale(double factor, bool addend = false);

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  OperatorPtr with_addend(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& builder) const override;
  float factor() const { return static_cast<float>(factor_); }
  bool has_addend() const { return addend_; }

 private:
  double factor_;
  bool addend_;
};

OperatorPtr make_scale(double factor);
void add_scale_cpu(KernelTable& table);
void add_scale_cuda(KernelTable& table);

}  // namespace tessera
