#pragma once

#include "ops/operator.h"

namespace tessera {

/// Sums of F32 values that travel as BF16 (MegaScale-MoE, section 5, figure 11): every summand is
/// rounded once, and the sum is made in F32 where it is wanted.

/// (x F32 [n]) -> BF16 [n], rounded to nearest even. On the host the output may begin where x does,
/// or before; elsewhere they must not overlap.
class RoundToBf16 final : public Operator {
 public:
  static constexpr std::string_view kName = "round_to_bf16";
  enum Input : int { kX };
  enum Output : int { kRounded };
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
};

/// (parts BF16 [P - 1, n], own F32 [n]) -> F32 [n]: the sum of P parts in their order, of which
/// part `own` is the second input, rounded to BF16 like the others. The output may be that input.
class SumBf16Parts final : public Operator {
 public:
  static constexpr std::string_view kName = "sum_bf16_parts";
  enum Input : int { kParts, kOwn };
  enum Output : int { kSum };

  explicit SumBf16Parts(int64_t own) : own_(own) {}

  std::string_view name() const override { return kName; }
  std::string attributes() const override { return fmt::format("own={}", own_); }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  int64_t own() const { return own_; }

 private:
  int64_t own_;
};

OperatorPtr make_round_to_bf16();
OperatorPtr make_sum_bf16_parts(int64_t own);

void add_bf16_sum_cpu(KernelTable& table);
void add_bf16_sum_cuda(KernelTable& table);

}  // namespace tessera
