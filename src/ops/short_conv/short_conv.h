#pragma once

#include "ops/operator.h"

namespace tessera {

struct ShortConvSpec {
  bool biased = false;
  bool silu = true;  ///< false: the sums themselves, as a gated convolution's (LFM2)
  /// Channels of weight and bias, W; x may have some of them, from first_channel on. 0: it has all.
  int64_t all_channels = 0;
  int64_t first_channel = 0;
};

/// A causal convolution of each channel over a few tokens, and SiLU behind it: the short
/// convolution in front of a linear-attention mixer (Gated Delta Networks: Yang et al., 2024,
/// section 3.4) or a state-space one (Transformers are SSMs: Dao and Gu, 2024, figure 6). y[t, c] =
/// SiLU(bias[c] + sum over i of w[c, i] · x[t - (K - 1) + i, c]); what would lie before the first
/// token of t's sequence is 0. (x A [T,C], w F32 [W,K], cu_seqlens I32 [S+1], where `biased` the
/// bias F32 [W]) -> y A [T,C]. Sequence s is the rows cu_seqlens[s] to cu_seqlens[s + 1]; kernels
/// for the CPU throw UserError unless these rise from 0 to T.
class ShortConv final : public Operator {
 public:
  static constexpr std::string_view kName = "short_conv";
  static constexpr int64_t kMaxTaps = 16;
  enum Input : int { kX, kWeight, kCuSeqlens, kBias };
  enum Output : int { kY };
  explicit ShortConv(ShortConvSpec spec = {}) : spec_(spec) {}
  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  const ShortConvSpec& spec() const { return spec_; }
  bool biased() const { return spec_.biased; }
  bool silu() const { return spec_.silu; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& builder) const override;

 private:
  ShortConvSpec spec_;
};

/// (x, w, cu_seqlens, grad of y A [T,C], perhaps the bias) -> (grad of x A [T,C]; grad of w F32
/// [W,K] and perhaps of the bias F32 [W], accumulated in the order of the tokens; of channels that
/// x has not, nothing). The sums before SiLU are computed again.
class ShortConvBackward final : public Operator {
 public:
  static constexpr std::string_view kName = "short_conv_backward";
  enum Input : int { kX, kWeight, kCuSeqlens, kGrad, kBias };
  enum Output : int { kGradX, kGradWeight, kGradBias };
  explicit ShortConvBackward(ShortConvSpec spec = {}) : spec_(spec) {}
  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  const ShortConvSpec& spec() const { return spec_; }
  bool biased() const { return spec_.biased; }
  bool silu() const { return spec_.silu; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  bool accumulates(int output) const override { return output != kGradX; }

 private:
  ShortConvSpec spec_;
};

/// The same of T tokens that follow earlier ones, for generation, whose last K inputs the state A
/// [K,C] holds; it is bound from outside as accumulators are, and moves on. (x A [T,C], w F32
/// [C,K], start I32 [1], perhaps the bias) -> (y A [T,C], the state). Where start, the number of
/// earlier tokens, is 0, what the state held is not read. No gradient.
class ShortConvCached final : public Operator {
 public:
  static constexpr std::string_view kName = "short_conv_cached";
  enum Input : int { kX, kWeight, kStart, kBias };
  enum Output : int { kY, kState };
  explicit ShortConvCached(ShortConvSpec spec = {}) : spec_(spec) {}
  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  const ShortConvSpec& spec() const { return spec_; }
  bool biased() const { return spec_.biased; }
  bool silu() const { return spec_.silu; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  bool accumulates(int output) const override { return output == kState; }
  bool recomputable() const override { return false; }

 private:
  ShortConvSpec spec_;
};

OperatorPtr make_short_conv(ShortConvSpec spec = {});
OperatorPtr make_short_conv_cached(ShortConvSpec spec = {});
void add_short_conv_cpu(KernelTable& table);
void add_short_conv_cuda(KernelTable& table);

}  // namespace tessera
