#pragma once

#include "ops/operator.h"

namespace tessera {

/// Copies of heads, for keys and values with fewer heads than the ranks that heads are spread over.
/// A is F32 or BF16; the rows may be ragged. Each is the other's gradient.
class HeadRepetition : public Operator {
 public:
  enum Input : int { kX };
  enum Output : int { kY };

  /// `num_heads` heads without copies, `times` copies of each. Throws UserError where one is below
  /// 1.
  HeadRepetition(int64_t num_heads, int64_t times);
  int64_t num_heads() const { return num_heads_; }
  int64_t times() const { return times_; }
  /// "heads=2 times=4".
  std::string attributes() const override;

 protected:
  void check_heads(std::span<const ValueType> inputs, int64_t heads_in_row) const;

 private:
  int64_t num_heads_;
  int64_t times_;
};

/// (x A [T, n·D]) -> A [T, n·times·D]: the copies of a head stand side by side.
class RepeatHeads final : public HeadRepetition {
 public:
  static constexpr std::string_view kName = "repeat_heads";
  using HeadRepetition::HeadRepetition;
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;
};

/// (x A [T, n·times·D]) -> A [T, n·D]: the sum of each head's copies, in order, in F32, rounded
/// once.
class SumHeads final : public HeadRepetition {
 public:
  static constexpr std::string_view kName = "sum_heads";
  using HeadRepetition::HeadRepetition;
  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;
  void differentiate(GradientBuilder& builder) const override;
};

OperatorPtr make_repeat_heads(int64_t num_heads, int64_t times);
OperatorPtr make_sum_heads(int64_t num_heads, int64_t times);
void add_repeat_heads_cpu(KernelTable& table);
void add_repeat_heads_cuda(KernelTable& table);

}  // namespace tessera
