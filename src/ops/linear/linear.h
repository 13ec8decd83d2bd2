#pragma once

#include "ops/addend.h"

namespace tessera {

/// y = x · weightᵀ (+ bias or addend): (x A [T, in], weight A [out, in], and bias: F32 [out], or
/// addend: A [T, out]) -> A [T, out]. Dim T may be ragged, but with an addend. A BF16 result is
/// rounded once, after the bias or the addend. A is F32 or BF16; or x and weight are F16, and all
/// else F32 (product_dtype), in the gradients too.
class Linear final : public Operator, public TakesAddend {
 public:
  static constexpr std::string_view kName = "linear";
  enum Input : int { kX, kWeight, kBias = 2, kAddend = 2 };
  enum Output : int { kY };

  enum class Extra { kNone, kBias, kAddend };
  explicit Linear(Extra extra) : extra_(extra) {}

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& builder) const override;
  OperatorPtr with_addend(std::span<const ValueType> inputs) const override;
  Extra extra() const { return extra_; }

 private:
  Extra extra_;
};

/// The gradient of x: (grad A [T, out], weight A [out, in], and with addend: A [T, in]) ->
/// A [T, in].
class LinearDgrad final : public Operator, public TakesAddend {
 public:
  static constexpr std::string_view kName = "linear_dgrad";
  enum Input : int { kGrad, kWeight, kAddend };
  enum Output : int { kGradX };

  explicit LinearDgrad(bool addend = false) : addend_(addend) {}

  std::string_view name() const override { return kName; }
  std::string attributes() const override { return addend_ ? "addend" : ""; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  OperatorPtr with_addend(std::span<const ValueType> inputs) const override;
  bool addend() const { return addend_; }

 private:
  bool addend_;
};

/// The gradient of the weight: (x A [T, in], grad A [T, out]) -> F32 [out, in], accumulated.
class LinearWgrad final : public Operator {
 public:
  static constexpr std::string_view kName = "linear_wgrad";
  enum Input : int { kX, kGrad };
  enum Output : int { kGradWeight };
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  bool accumulates(int /*output*/) const override { return true; }
};

/// The gradient of the bias: (grad A [T, out]) -> F32 [out], accumulated in a fixed order.
class LinearBiasGrad final : public Operator {
 public:
  static constexpr std::string_view kName = "linear_bias_grad";
  enum Input : int { kGrad };
  enum Output : int { kGradBias };
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  bool accumulates(int /*output*/) const override { return true; }
};

/// Rows of a BF16 result with bias or addend that are made at a time, in F32.
inline constexpr int64_t kLinearTileRows = 256;

OperatorPtr make_linear(bool bias = false);
void add_linear_cpu(KernelTable& table);
/// Linear alone, by gemm_of_rows.
void add_linear_of_rows_cpu(KernelTable& table);
void add_linear_cuda(KernelTable& table);

}  // namespace tessera
