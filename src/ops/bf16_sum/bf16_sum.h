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

/// (parts BF16 [P - 1, n], own F32 or BF16 [n]) -> [n] of own's type: the sum of P parts in their
/// order, made in F32, of which part `own` is the second input, rounded to BF16 like the others.
/// The output may be that input. Where it is BF16, the sum is rounded to nearest even.
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

/// (x F32 [n]) -> BF16 [n], an accumulator: its values and x are added in F32 and rounded to
/// nearest even; where it holds nothing yet (KernelArgs::set_accumulators), x is rounded. The two
/// must not overlap.
class AddToBf16 final : public Operator {
 public:
  static constexpr std::string_view kName = "add_to_bf16";
  enum Input : int { kX };
  enum Output : int { kSum };
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  bool accumulates(int /*output*/) const override { return true; }
  bool recomputable() const override { return false; }
};

OperatorPtr make_round_to_bf16();
OperatorPtr make_sum_bf16_parts(int64_t own);
OperatorPtr make_add_to_bf16();

void add_bf16_sum_cpu(KernelTable& table);
void add_bf16_sum_cuda(KernelTable& table);

}  // namespace tessera
