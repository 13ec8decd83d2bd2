#pragma once

#include "ops/operator.h"

namespace tessera {

/// y = x · weightᵀ (+ bias): (x A [T, in], weight A [out, in], and with bias: bias F32 [out]) ->
/// A [T, out]. Dim T may be ragged. A BF16 result is rounded once, after the bias.
class Linear final : public Operator {
 public:
  explicit Linear(bool bias) : bias_(bias) {}

  std::string_view name() const override { return "linear"; }
  std::string attributes() const override { return bias_ ? "bias" : ""; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& builder) const override;
  int64_t cpu_workspace_bytes(std::span<const ValueType> inputs) const override;

 private:
  bool bias_;
};

/// The gradient of x: (grad A [T, out], weight A [out, in]) -> A [T, in].
class LinearDgrad final : public Operator {
 public:
  std::string_view name() const override { return "linear_dgrad"; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
};

/// The gradient of the weight: (x A [T, in], grad A [T, out]) -> F32 [out, in], accumulated.
class LinearWgrad final : public Operator {
 public:
  std::string_view name() const override { return "linear_wgrad"; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  bool accumulates(int /*output*/) const override { return true; }
};

/// The gradient of the bias: (grad A [T, out]) -> F32 [out], accumulated in a fixed order.
class LinearBiasGrad final : public Operator {
 public:
  std::string_view name() const override { return "linear_bias_grad"; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  bool accumulates(int /*output*/) const override { return true; }
  int64_t cpu_workspace_bytes(std::span<const ValueType> inputs) const override;
};

/// Rows of a BF16 result with bias that are made at a time, in F32.
inline constexpr int64_t kLinearBiasRows = 256;

OperatorPtr make_linear(bool bias = false);
void add_linear_cpu(KernelTable& table);
void add_linear_cuda(KernelTable& table);

}  // namespace tessera
