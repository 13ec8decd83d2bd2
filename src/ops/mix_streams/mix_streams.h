#pragma once

#include "ops/operator.h"

namespace tessera {

/// How what a part of a layer gives joins residual streams, which are mixed as it does
/// (StreamWeights; mHC: Xie et al., 2026, section 4.2; DeepSeek-V4, section 2.2):
///   (x A [T, n·H], whose rows have stream behind stream, given A [T, H], post F32 [T, n],
///    comb F32 [T, n·n]) -> y A [T, n·H]
/// y[k] = post[k] · given + Σ_j comb[j, k] · x[j], summed in F32 and rounded once.
class MixStreams final : public Operator {
 public:
  static constexpr std::string_view kName = "mix_streams";
  enum Input : int { kX, kGiven, kPost, kComb };
  enum Output : int { kY };

  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& builder) const override;
};

/// (x, given, post, comb, grad of y A [T, n·H]) -> (dx A [T, n·H], dgiven A [T, H], dpost F32 [T,
/// n], dcomb F32 [T, n·n]).
class MixStreamsBackward final : public Operator {
 public:
  static constexpr std::string_view kName = "mix_streams_backward";
  enum Input : int { kX, kGiven, kPost, kComb, kGrad };
  enum Output : int { kGradX, kGradGiven, kGradPost, kGradComb };

  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
};

/// Up to 8 streams.
OperatorPtr make_mix_streams();
void add_mix_streams_cpu(KernelTable& table);
void add_mix_streams_cuda(KernelTable& table);

}  // namespace tessera
