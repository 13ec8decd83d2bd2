#pragma once

#include "ops/activation_kind.h"
#include "ops/reads_scaled_rows.h"

namespace tessera {

/// The activation of a dense MLP. Gated kinds: (gate_up A [T, 2F], the gate in the first F columns)
/// -> A [T, F] = f(gate) · up,
/// of a clamped SwiGLU as ActivationFunction has it. Others: (x A [T, F]) -> A [T, F] = f(x). Dim T
/// may be ragged.
class ActivationOp final : public Operator {
 public:
  static constexpr std::string_view kName = "activation";
  enum Input : int { kX };
  enum Output : int { kY };

  explicit ActivationOp(const ActivationFunction& function) : function_(function) {}

  std::string_view name() const override { return kName; }
  std::string attributes() const override { return to_string(function_); }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;
  const ActivationFunction& function() const { return function_; }

 private:
  ActivationFunction function_;
};

/// (the forward input, grad A [T, F]) -> the gradient of the forward input, of which x may be kept
/// as E4M3 with scales of its rows.
class ActivationBackward final : public Operator, public ReadsScaledRows {
 public:
  static constexpr std::string_view kName = "activation_backward";
  enum Input : int { kX, kGrad };
  enum Output : int { kGradX };

  explicit ActivationBackward(const ActivationFunction& function,
                              RowFormat x_format = RowFormat::kValues)
      : function_(function), x_format_(x_format) {}

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  OperatorPtr reading_scaled_rows(int input) const override;
  const ActivationFunction& function() const { return function_; }
  RowFormat x_format() const { return x_format_; }

 private:
  ActivationFunction function_;
  RowFormat x_format_;
};

OperatorPtr make_activation(const ActivationFunction& function);
void add_activation_cpu(KernelTable& table);
void add_activation_cuda(KernelTable& table);

}  // namespace tessera
