#pragma once

#include "ops/addend.h"

namespace tessera {

/// What a part of a layer reads of residual streams, their weighted sum (StreamWeights; mHC: Xie et
/// al., 2026, section 4.2): (x A [T, n·H], whose rows have stream behind stream, pre F32 [T, n]) ->
/// y A [T, H] = Σ_j pre[j] · x[j], summed in F32 and rounded once.
class CollapseStreams final : public Operator {
 public:
  static constexpr std::string_view kName = "collapse_streams";
  enum Input : int { kX, kPre };
  enum Output : int { kY };

  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& builder) const override;
};

/// (x, pre, grad of y A [T, H], [addend A [T, n·H]]) -> (dx A [T, n·H], plus the addend; dpre F32
/// [T, n]).
class CollapseStreamsBackward final : public Operator, public TakesAddend {
 public:
  static constexpr std::string_view kName = "collapse_streams_backward";
  enum Input : int { kX, kPre, kGrad, kAddend };
  enum Output : int { kGradX, kGradPre };

  explicit CollapseStreamsBackward(bool addend = false) : addend_(addend) {}
  bool addend() const { return addend_; }

  std::string_view name() const override { return kName; }
  std::string attributes() const override { return addend_ ? "addend" : ""; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  OperatorPtr with_addend(std::span<const ValueType> inputs) const override;

 private:
  bool addend_;
};

OperatorPtr make_collapse_streams();
void add_collapse_streams_cpu(KernelTable& table);
void add_collapse_streams_cuda(KernelTable& table);

}  // namespace tessera
