#pragma once

#include "ops/operator.h"

namespace tessera {

/// y = c · tanh(x / c), element by element: logits that Gemma caps softly. (x A [..]) -> y A [..].
/// Computed in F32 and rounded once. Of logits that are given out: it has no gradient, losses cap
/// theirs themselves (CrossEntropySpec::softcap).
class Softcap final : public Operator {
 public:
  static constexpr std::string_view kName = "softcap";
  enum Input : int { kX };
  enum Output : int { kY };

  /// Throws UserError unless the cap is above 0 and finite.
  explicit Softcap(double cap);

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& builder) const override;
  float cap() const { return static_cast<float>(cap_); }

 private:
  double cap_;
};

OperatorPtr make_softcap(double cap);
void add_softcap_cpu(KernelTable& table);
void add_softcap_cuda(KernelTable& table);

}  // namespace tessera
