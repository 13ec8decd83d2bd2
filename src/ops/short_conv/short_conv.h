#pragma once

#include "ops/operator.h"

namespace tessera {

/// A causal convolution of each channel over a few tokens, and SiLU behind it: the short
/// convolution in front of a linear-attention mixer (Gated Delta Networks: Yang et al., 2024,
/// section 3.4). y[t, c] = SiLU(sum over i of w[c, i] · x[t - (K - 1) + i, c]); what would lie
/// before the first token of t's sequence is 0. (x A [T,C], w F32 [C,K], cu_seqlens I32 [S+1]) ->
/// y A [T,C]. Sequence s is the rows cu_seqlens[s] to cu_seqlens[s + 1]; kernels for the CPU throw
/// UserError unless these rise from 0 to T.
class ShortConv final : public Operator {
 public:
  static constexpr std::string_view kName = "short_conv";
  static constexpr int64_t kMaxTaps = 16;
  enum Input : int { kX, kWeight, kCuSeqlens };
  enum Output : int { kY };
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& builder) const override;
};

/// (x, w, cu_seqlens, grad of y A [T,C]) -> (grad of x A [T,C], grad of w F32 [C,K], accumulated in
/// the order of the tokens). The sums before SiLU are computed again.
class ShortConvBackward final : public Operator {
 public:
  static constexpr std::string_view kName = "short_conv_backward";
  enum Input : int { kX, kWeight, kCuSeqlens, kGrad };
  enum Output : int { kGradX, kGradWeight };
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  bool accumulates(int output) const override { return output == kGradWeight; }
};

/// The same of T tokens that follow earlier ones, for generation, whose last K inputs the state A
/// [K,C] holds; it is bound from outside as accumulators are, and moves on. (x A [T,C], w F32
/// [C,K], start I32 [1]) -> (y A [T,C], the state). Where start, the number of earlier tokens, is
/// 0, what the state held is not read. No gradient.
class ShortConvCached final : public Operator {
 public:
  static constexpr std::string_view kName = "short_conv_cached";
  enum Input : int { kX, kWeight, kStart };
  enum Output : int { kY, kState };
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  bool accumulates(int output) const override { return output == kState; }
  bool recomputable() const override { return false; }
};

OperatorPtr make_short_conv();
OperatorPtr make_short_conv_cached();
void add_short_conv_cpu(KernelTable& table);
void add_short_conv_cuda(KernelTable& table);

}  // namespace tessera
